"""OpenAI's SDK, streamed, with usage; and a stream that is closed early and asked for again."""

import openai

client = openai.OpenAI()
ask = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
text = ""
usage = None
for chunk in client.chat.completions.create(**ask, stream_options={"include_usage": True}):
    usage = chunk.usage or usage
    for choice in chunk.choices:
        text += choice.delta.content or ""
assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
stream = client.chat.completions.create(**ask)
next(iter(stream))
stream.close()
print(float(text == "Yes."))
