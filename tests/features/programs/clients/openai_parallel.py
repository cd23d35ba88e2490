"""OpenAI's SDK, four requests at once, two of them alike, and one that joins them."""

import asyncio

import openai

client = openai.AsyncOpenAI()


async def ask(text: str) -> str:
    messages = [{"role": "user", "content": text}]
    answer = await client.chat.completions.create(model="m", messages=messages)
    return answer.choices[0].message.content


async def main() -> None:
    answers = await asyncio.gather(*(ask(f"Describe its {what}") for what in "abca"))
    await ask(" / ".join(answers))


asyncio.run(main())
print(1)
