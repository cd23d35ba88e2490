"""OpenAI's SDK: a conversation, log-probs, what is refused, and the list of models."""

import json

import openai

client = openai.OpenAI(max_retries=0)
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
for _ in range(2):
    answer = client.chat.completions.create(
        model="gpt-4o", messages=messages, max_tokens=20, temperature=1.0, logprobs=True
    )
    choice = answer.choices[0]
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    assert choice.finish_reason == "stop" and answer.usage.prompt_tokens > 0
    messages.append({"role": "assistant", "content": choice.message.content})
    messages.append({"role": "user", "content": [{"type": "text", "text": "More?"}]})
picture = [{"type": "image_url", "image_url": {"url": "x"}}]
for wrong in (
    {"n": 2},
    {"logprobs": True, "top_logprobs": 3},
    {"modalities": ["text", "audio"]},
    {"messages": [{"role": "user", "content": picture}]},
    {"max_tokens": 0},
):
    try:
        client.chat.completions.create(**({"model": "m", "messages": messages} | wrong))
        raise SystemExit(f"not refused: {wrong}")
    except openai.BadRequestError:
        pass
assert client.models.list().data[0].id == "policy"
print(json.dumps({"reward": float(choice.message.content == "Fine.")}))
