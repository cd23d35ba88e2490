"""The quickstart's game as a program of its own: guess a number from 1 to 10 in four turns.

It knows nothing of the trainer: it asks a chat API for its turns, over the standard library alone,
and its last line says what it earned.
"""

import json
import os
import random
import urllib.request


def ask(messages: list[dict[str, str]]) -> str:
    """Returns the answer to a conversation."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        data=json.dumps({"model": "policy", "messages": messages}).encode(),
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def play(number: int) -> float:
    """Plays a game; returns its reward."""
    messages = [{"role": "user", "content": "guess"}]
    for _ in range(4):
        answer = ask(messages)
        if not answer.strip().isdigit():
            return 0.0
        guess = int(answer)
        if guess == number:
            return 1.0
        hint = "higher" if guess < number else "lower"
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": hint})
    return 0.0


if __name__ == "__main__":
    seed = int(os.environ["SEED"])
    print(json.dumps({"reward": play(random.Random(seed).randint(1, 10))}))
