"""Plays second in textarena's games for two: random moves, a user's code, an earlier policy.

Each is called with what the game has said to it since its last move, and returns its move.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from custom.env import Message
from data.loading import load_object

Opponent: TypeAlias = Callable[[str], str]

OPPONENTS = "random, FILE.py:NAME, PACKAGE.MODULE:NAME or hf:FOLDER"
# Tokens of a policy's move.
MAX_MOVE_TOKENS = 128

BRACKETED = re.compile(r"\[([^\[\]\n]{1,60})\]")
# The chance that a drawn move is one of the game's latest words as it is, and that it is that or
# has other numbers only, not numbers for words.
AS_LISTED = 0.25
NUMBERS_ONLY = 0.6
# Numbers that are drawn in any game, and how many different ones are.
COMMON_NUMBERS = {3, 5, 9}
MAX_NUMBERS = 12
# Digits of a number that are read.
MAX_DIGITS = 6


def opponent_maker(source: str) -> Callable[[int], Opponent] | None:
    """Returns what makes an episode's opponent from its seed.

    Args:
        source: "random"; "FILE.py:NAME" or "PACKAGE.MODULE:NAME", a function of the observation, or
            a class that is built from each episode's seed and called with it; "hf:FOLDER", see
            PolicyOpponent.
    Returns:
        None for "random", whose moves the game's rules choose.
    Raises:
        ValueError, FileNotFoundError: what does not exist.
    """
    if source == "random":
        return None
    if source.startswith("hf:"):
        folder = str(Path(source.removeprefix("hf:")).expanduser().resolve())
        if not (Path(folder) / "config.json").is_file():
            raise FileNotFoundError(
                f"opponent={source!r}: {folder} holds no config.json; give a Hugging Face folder"
            )
        return lambda seed: PolicyOpponent(folder)
    if ":" not in source:
        raise ValueError(f"opponent={source!r} is unknown; allowed: {OPPONENTS}")
    loaded = load_object(source, "opponent")
    if isinstance(loaded, type):
        return loaded
    return lambda seed: loaded


@dataclass
class PolicyOpponent:
    """Plays a policy from a Hugging Face folder, greedily.

    Such as global_step_N/actor/huggingface of an earlier run. It keeps a conversation as the player
    does: observations from the user, its own moves from the assistant.

    Args:
        folder: has the model, the tokenizer and its chat template, and is loaded once per process.
    """

    folder: str
    messages: list[Message] = field(default_factory=list, init=False)

    def __call__(self, observation: str) -> str:
        """Adds the observation to the conversation and returns the policy's answer."""
        policy = load_policy(self.folder)
        conversation = [*self.messages, {"role": "user", "content": observation}]
        answers = policy(conversation, max_new_tokens=MAX_MOVE_TOKENS, do_sample=False)
        self.messages = answers[0]["generated_text"]
        return self.messages[-1]["content"]


@cache
def load_policy(folder: str) -> Any:
    """Loads the policy and its tokenizer once per process."""
    from transformers import pipeline

    return pipeline("text-generation", folder, device="cpu")


def draw_moves(words: str, latest: str, generator: random.Random) -> Iterator[str]:
    """Yields moves without end, in the form that a game's words show.

    "[4]" is such a form, and "[pile quantity]", of which "[0 3]" is made.

    Args:
        words: all that the game has said.
        latest: its latest words, which often list what is allowed: some moves are taken from them
            as they are. Most are taken from any words, with other numbers, and in half of those
            with numbers for words: "row" and "<x>" may stand for them.
        generator: what draws them.
    """
    listed = BRACKETED.findall(latest) or BRACKETED.findall(words) or ["0"]
    shapes = BRACKETED.findall(words) or listed
    numbers = {int(digits[:MAX_DIGITS]) for digits in re.findall(r"\d+", words)}
    largest_numbers = sorted(numbers | COMMON_NUMBERS)[:MAX_NUMBERS]

    def draw_number(_: re.Match[str]) -> str:
        return str(generator.randint(0, generator.choice(largest_numbers)))

    while True:
        shape = generator.choice(shapes)
        kind = generator.random()
        places = r"\d+|<\w+>"
        if kind >= NUMBERS_ONLY:
            places += r"|[A-Za-z]{2,}"
        move = re.sub(places, draw_number, shape)
        if kind < AS_LISTED:
            move = generator.choice(listed)
        yield f"[{move}]"
