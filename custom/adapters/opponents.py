"""Who plays the other seat of a game of two: moves drawn at random, a user's function or class, an earlier policy.

Invariant: an opponent is called with what the game has said to it since its last move and returns its move; with equal
seeds and observations it moves equally.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from custom.env import Message, takes_keyword
from data.loading import load_object

Opponent = Callable[[str], str]

BRACKETED = re.compile(r"\[([^\[\]\n]{1,60})\]")
OPPONENTS = "random, FILE.py:NAME, PACKAGE.MODULE:NAME or hf:FOLDER"


def opponent_maker(source: str, options: Mapping[str, Any]) -> Callable[[int], Opponent] | None:
    """Returns what makes an episode's opponent from its seed; None for "random", whose moves the game's rules choose.

    Args:
        source: "random"; "FILE.py:NAME" or "PACKAGE.MODULE:NAME", a function of the observation, or a class that is
            built for each episode and called with it; "hf:FOLDER", see PolicyOpponent.
        options: keyword arguments of the function, the class or PolicyOpponent; `seed` is added where it is taken.
    Raises: ValueError, FileNotFoundError for what does not exist.
    """
    if source == "random":
        if options:
            raise ValueError(f"opponent=random takes no opponent_options, given: {', '.join(options)}")
        return None
    if source.startswith("hf:"):
        folder = str(Path(source.removeprefix("hf:")).expanduser().resolve())
        if not (Path(folder) / "config.json").is_file():
            raise FileNotFoundError(f"opponent={source!r}: {folder} holds no config.json; give a Hugging Face folder")
        return lambda seed: PolicyOpponent(folder, **{"seed": seed, **options})
    if ":" not in source:
        raise ValueError(f"opponent={source!r} is unknown; allowed: {OPPONENTS}")
    make = load_object(source, "opponent")

    def opponent(seed: int) -> Opponent:
        further = {**options, **({"seed": seed} if takes_keyword(make, "seed") else {})}
        return make(**further) if isinstance(make, type) else partial(make, **further)

    return opponent


@dataclass
class PolicyOpponent:
    """Plays a policy from a Hugging Face folder, such as global_step_N/actor/huggingface of an earlier run.

    It keeps a conversation as the player does: observations from the user, its own moves from the assistant.

    Args:
        folder: with the model, the tokenizer and its chat template; loaded once per process.
        max_new_tokens: the longest move, in tokens.
        temperature: 0 is greedy.
        device: "cpu", "cuda" …
        seed: of what it samples.
    """

    folder: str
    max_new_tokens: int = 128
    temperature: float = 0.0
    device: str = "cpu"
    seed: int = 0
    messages: list[Message] = field(default_factory=list, init=False)

    def __call__(self, observation: str) -> str:
        """Adds the observation to the conversation and returns the policy's answer."""
        import torch

        said = [*self.messages, {"role": "user", "content": observation}]
        sampling = {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}
        with torch.random.fork_rng(devices=[self.device] if self.device.startswith("cuda") else []):
            play = load_policy(self.folder, self.device)
            torch.manual_seed(self.seed + len(said))
            self.messages = play(said, max_new_tokens=self.max_new_tokens, **sampling)[0]["generated_text"]
        return self.messages[-1]["content"]


@cache
def load_policy(folder: str, device: str) -> Any:
    """Loads the policy and its tokenizer once per process."""
    from transformers import pipeline

    return pipeline("text-generation", folder, device=device)


def draw_moves(said: str, latest: str, generator: random.Random) -> Iterator[str]:
    """Yields moves without end, in the form that a game's words show: "[4]", "[pile quantity]" -> "[4]", "[0 3]".

    Some are taken from the latest words as they are, which often list what is allowed; most from any words, with other
    numbers, coordinates and letters; and a few are single words of the game.
    """
    listed = BRACKETED.findall(latest) or BRACKETED.findall(said) or ["0"]
    shapes = list(dict.fromkeys(BRACKETED.findall(said))) or listed
    numbers = sorted({int(digits[:6]) for digits in re.findall(r"\d+", said)} | {3, 5, 9})
    letters = sorted(set(re.findall(r"\b[A-Za-z]\b", said)) | {"a", "b"})
    words = sorted(set(re.findall(r"[^\W\d_]+", said))) or ["pass"]
    while True:
        kind = generator.random()
        move = generator.choice(listed if kind < 0.25 else shapes if kind < 0.85 else words)
        yield f"[{_vary(move, generator.choice(numbers[:12]), letters, generator) if 0.25 <= kind < 0.85 else move}]"


def _vary(shape: str, most: int, letters: list[str], generator: random.Random) -> str:
    """Draws another move of this shape: squares near each other, other numbers up to `most`, other letters, …

    … and, in some, numbers for all words, or for half of them: "row" and "<x>" may stand for numbers.
    """

    def number(match: re.Match[str]) -> str:
        return str(generator.randint(0, most))

    column, row = generator.randrange(8), generator.randint(0, 8)

    def square(match: re.Match[str]) -> str:
        nonlocal column, row
        drawn = f"{'abcdefghijklmno'[abs(column)]}{abs(row)}"
        column, row = column + generator.randint(-2, 2), row + generator.randint(-2, 2)
        return drawn.upper() if match[1].isupper() else drawn

    shape = re.sub(r"(?<![A-Za-z])([A-Za-z])\d{1,2}", square, shape)
    shape = re.sub(r"(?<![A-Za-z\d])\d+|<\w+>", number, shape)
    share = generator.choice((0.0, 0.5, 1.0))
    shape = re.sub(r"[A-Za-z]{2,}", lambda match: number(match) if generator.random() < share else match[0], shape)
    single = generator.choice((number, lambda match: generator.choice(letters), lambda match: match[0]))
    return re.sub(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z\d])", single, shape)
