"""The trial: what a game pays for random and for useless answers, before a run trains on it.

A policy learns whatever pays best. Where answers that nobody can read, or ending early, pay more than play does, it
learns that. Invariant: nothing that an agent does in a trial is raised, but for what ends its home.
"""

import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from custom.env import describe

# Seconds after which no further episode begins, and a running one ends.
LONGEST_S = 10.0
GARBAGE = ("zzz", "I would rather not say.", "?!", "", "The the the the the.")
# Each plays: with random answers, with useless ones, with a random one and then useless ones, and with a random one
# after which the row is full.
PLAYERS = ("random", "garbage", "quitting", "cut")


@dataclass(frozen=True)
class Outcome:
    """Holds what one player got: means over its episodes, the attempts that crashed, and the first error."""

    reward: float
    turns: float
    episodes: int
    crashes: int
    error: str


@dataclass(frozen=True)
class Trial:
    """Holds what came of a trial.

    Attributes:
        outcomes: by player; those for whom there was no time are left out.
        readable: the random answers were the environment's own (`sample_action`), else words of what it said.
        max_turns: the most turns that the game lasts by its own rules; None: unknown.
    """

    outcomes: dict[str, Outcome]
    readable: bool
    max_turns: int | None


def play_trial(agent: Any, seed: int, episodes: int, max_turn: int) -> Trial:
    """Has every player play `episodes` episodes of at most `max_turn` turns, the same tasks for each."""
    environment, end = agent.environment, time.monotonic() + LONGEST_S
    readable = _own_action(environment, random.Random(seed)) is not None
    # In turn, so that each has played where time runs out.
    results: dict[str, list[tuple[float, int, str]]] = {player: [] for player in PLAYERS}
    for number in range(episodes):
        for player in PLAYERS:
            if time.monotonic() < end:
                results[player].append(_play(agent, player, seed + number, max_turn, end))
    outcomes = {player: _outcome(played) for player, played in results.items() if played}
    return Trial(outcomes, readable, getattr(environment, "max_turns", None))


def _play(agent: Any, player: str, seed: int, max_turn: int, end: float) -> tuple[float, int, str]:
    """Plays an episode; returns its reward, its turns, and the error that ended it."""
    generator, total, turns = random.Random(seed), 0.0, 0
    try:
        messages, done = agent.reset(seed), False
        while not done and turns < (1 if player == "cut" else max_turn) and time.monotonic() < end:
            answer = _answer(player, turns, agent.environment, generator, messages)
            messages, reward, done, _ = agent.step(answer)
            total, turns = total + reward, turns + 1
        own = agent.episode_reward("done" if done else "overflow" if player == "cut" else "max_turns")
        return total if own is None else own, turns, ""
    # Whatever a user's code raises is what the trial is to find out.
    except (Exception, SystemExit) as error:
        return total, turns, describe(error)


def _answer(
    player: str, turn: int, environment: Any, generator: random.Random, said: Sequence[Mapping[str, str]]
) -> str:
    if player == "garbage" or (player == "quitting" and turn > 0):
        return generator.choice(GARBAGE)
    own = _own_action(environment, generator)
    return _word(said, generator) if own is None else own


def _own_action(environment: Any, generator: random.Random) -> str | None:
    sample = getattr(environment, "sample_action", None)
    return sample(generator) if callable(sample) else None


def _word(messages: Sequence[Mapping[str, str]], generator: random.Random) -> str:
    """Draws a word or number from what was said last."""
    words = re.findall(r"\w+", messages[-1]["content"]) if messages else []
    return generator.choice(words or ["hello"])


def _outcome(played: list[tuple[float, int, str]]) -> Outcome:
    errors = [error for _, _, error in played if error]
    return Outcome(
        reward=sum(reward for reward, _, _ in played) / len(played),
        turns=sum(turns for _, turns, _ in played) / len(played),
        episodes=len(played),
        crashes=len(errors),
        error=errors[0] if errors else "",
    )
