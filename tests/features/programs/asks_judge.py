"""Programs and a reward function that ask a model beside the policy."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

QUESTION = [{"role": "user", "content": "is it right?"}]


async def solve(task: dict[str, Any], client: Any, models: Any) -> float:
    """Asks the policy, and the judge in both ways that a function has."""
    said = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "guess"}]
    )
    told = await models["judge"].ask_async(f"{said.id}: {said.choices[0].message.content}")
    verdict = await client.chat.completions.create(
        model="judge", messages=QUESTION, temperature=1.0
    )
    return float(told == verdict.choices[0].message.content == "0.5")


async def asks_and_hangs(client: Any, models: Any) -> None:
    await models["judge"].ask_async("?")
    await asyncio.sleep(1000)


def judged(conversations: list[Any], models: Any) -> float:
    return float(models["judge"].ask(f"{len(conversations)} conversations"))


def main() -> None:
    """As a command, with the SDK alone."""
    import openai

    client = openai.OpenAI()
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "guess"}])
    try:
        verdict = client.chat.completions.create(model="judge", messages=QUESTION)
        print(verdict.choices[0].message.content)
    except openai.APIStatusError as error:
        print(json.dumps({"reward": -error.status_code, "metrics": {error.code: 1}}))


if __name__ == "__main__":
    sys.exit(main())
