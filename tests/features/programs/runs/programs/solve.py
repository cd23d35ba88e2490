"""The quickstart's game as functions: played one after the other, and by helpers at once."""

from __future__ import annotations

import asyncio
import random
from typing import Any


async def ask(client: Any, messages: list[dict[str, str]]) -> str:
    answer = await client.chat.completions.create(model="policy", messages=messages)
    return answer.choices[0].message.content


async def solve(task: dict[str, Any], client: Any, seed: int) -> float:
    number = random.Random(seed).randint(1, 10)
    messages = [{"role": "user", "content": "guess"}]
    for _ in range(4):
        answer = await ask(client, messages)
        if not answer.strip().isdigit():
            return 0.0
        if int(answer) == number:
            return 1.0
        hint = "higher" if int(answer) < number else "lower"
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": hint}]
    return 0.0


async def branch(task: dict[str, Any], client: Any) -> float:
    """Three answers to the same conversation at once, and a second turn of each."""
    start = [{"role": "user", "content": "guess"}]
    first = await ask(client, start)
    start += [{"role": "assistant", "content": first}]
    ways = [[*start, {"role": "user", "content": hint}] for hint in ("higher", "lower", "higher")]
    answers = await asyncio.gather(*(ask(client, way) for way in ways))
    return float(len({first, *answers})) / 4


def judge(task: Any, output: str, conversations: list[list[dict[str, str]]]) -> float:
    """Pays a tenth for each message of the policy's, whatever the program says."""
    roles = [message["role"] for messages in conversations for message in messages]
    return roles.count("assistant") / 10
