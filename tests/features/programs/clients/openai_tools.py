"""OpenAI's SDK with tools: the calls are made, and their results sent back."""

import json

import openai

client = openai.OpenAI()
tool = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {}, "b": {}}},
    },
}
messages = [{"role": "user", "content": "What is 2 + 3?"}]
for _ in range(4):
    ask = {"model": "m", "messages": messages, "tools": [tool], "tool_choice": "auto"}
    choice = client.chat.completions.create(**ask).choices[0]
    messages.append(choice.message.model_dump(exclude_none=True))
    if choice.finish_reason != "tool_calls":
        break
    for call in choice.message.tool_calls:
        numbers = json.loads(call.function.arguments)
        result = str(numbers["a"] + numbers["b"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(json.dumps({"reward": float(choice.message.content == "It is 5.")}))
