"""Anthropic's SDK: a loop over tools, every second answer streamed; and an error."""

import json

import anthropic

client = anthropic.Anthropic(max_retries=0)
tool = {
    "name": "add",
    "description": "Add.",
    "input_schema": {"type": "object", "properties": {"a": {}, "b": {}}},
}
messages = [{"role": "user", "content": "What is 2 + 3?"}]
for turn in range(4):
    ask = {"model": "claude", "max_tokens": 50, "messages": messages, "tools": [tool]}
    ask["system"] = "Be brief."
    if turn % 2:
        with client.messages.stream(**ask) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**ask)
    messages.append({"role": "assistant", "content": answer.content})
    uses = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == ("tool_use" if uses else "end_turn")
    if not uses:
        break
    results = []
    for use in uses:
        text = str(use.input["a"] + use.input["b"])
        results.append({"type": "tool_result", "tool_use_id": use.id, "content": text})
    messages.append({"role": "user", "content": results})
try:
    client.messages.create(model="claude", max_tokens=5, messages=[])
    raise SystemExit("not refused")
except anthropic.BadRequestError as error:
    assert "no messages" in str(error)
print(json.dumps({"reward": float(answer.content[0].text == "It is 5.")}))
