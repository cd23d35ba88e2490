"""The trial: what a game pays for random and for useless answers, before a run trains on it.

A policy learns whatever pays best. Where answers that nobody can read, or ending early, pay more than play does, it
learns that. Invariant: nothing that an agent does in a trial is raised, but for what ends its home.
"""

import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from custom.env import Abandoned, Message, Task, call_method, describe

# Seconds after which no further episode begins, and a running one is dropped.
LONGEST_S = 10.0
GARBAGE = ("zzz", "I would rather not say.", "?!", "", "The the the the the.")
# Each plays: with random answers, with useless ones, with a random one and then useless ones, and with a random one
# behind which there is no room for more. All but garbage begin with the same answer.
PLAYERS = ("random", "garbage", "quitting", "cut")


@dataclass
class Played:
    """Holds one episode: its reward and turns, the error that ended it, what it began with and was first told."""

    reward: float = 0.0
    turns: int = 0
    error: str = ""
    first: list[Message] = field(default_factory=list)
    told: list[Message] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """Holds what one player got: means over its episodes that did not crash, and of the others the first error."""

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
        differs: under one seed it began differently, or was told another thing after the same answer.
        told: what followed the first answer of an episode.
    """

    outcomes: dict[str, Outcome]
    readable: bool
    max_turns: int | None
    differs: bool
    told: list[Message]


def as_trial(fields: Mapping[str, Any] | None) -> Trial | None:
    """Makes a trial of its fields, as another process sent them; None of None."""
    if fields is None:
        return None
    return Trial(**{**fields, "outcomes": {player: Outcome(**own) for player, own in fields["outcomes"].items()}})


def play_trial(agent: Any, seed: int, episodes: int, max_turn: int, task: Task | None = None) -> Trial:
    """Has every player play `episodes` episodes of at most `max_turn` turns, the same tasks for each."""
    environment, end = agent.environment, time.monotonic() + LONGEST_S
    rounds: list[dict[str, Played | None]] = []
    differs = False
    # In turn, so that each has played where time runs out.
    for number in range(episodes):
        rounds.append({player: _play(agent, player, seed + number, task, max_turn, end) for player in PLAYERS})
        clean = {player: result for player, result in rounds[-1].items() if result and not result.error}
        begins = [result.first for result in clean.values()]
        answers = [result.told for player, result in clean.items() if player != "garbage"]
        differs |= any(one != begins[0] for one in begins) or any(one != answers[0] for one in answers)
    results = {player: [result for played in rounds if (result := played[player])] for player in PLAYERS}
    outcomes = {player: _outcome(played) for player, played in results.items() if played}
    readable = call_method(environment, "sample_action", random.Random(seed)) is not None
    told = next((result.told for result in results["random"] if result.told), [])
    most = getattr(environment, "max_turns", None)
    return Trial(outcomes, readable, most if isinstance(most, int) else None, differs, told)


def _play(agent: Any, player: str, seed: int, task: Task | None, max_turn: int, end: float) -> Played | None:
    """Plays an episode; None where time runs out."""
    # Of no generator that the environment may have made of the seed.
    generator, played = random.Random(f"trial {seed}"), Played()
    try:
        messages, done = agent.reset(seed, task), False
        played.first = list(messages)
        while not done and played.turns < (1 if player == "cut" else max_turn):
            if time.monotonic() > end:
                return None
            answer = _answer(player, played.turns, agent.environment, generator, messages)
            messages, reward, done, _ = agent.step(answer)
            played.reward, played.turns = played.reward + reward, played.turns + 1
            played.told = played.told or list(messages)
        own = agent.episode_reward("done" if done else "overflow" if player == "cut" else "max_turns")
        played.reward = played.reward if own is None else own
    # Whatever a user's code raises is what the trial is to find out.
    except BaseException as problem:
        if isinstance(problem, Abandoned | KeyboardInterrupt):
            raise
        played.error = describe(problem)
    return played


def _answer(player: str, turn: int, environment: Any, generator: random.Random, said: list[Message]) -> str:
    """Returns what the player says: a readable action where the environment has one, else a word of what was said."""
    if player == "garbage" or (player == "quitting" and turn > 0):
        return generator.choice(GARBAGE)
    own = call_method(environment, "sample_action", generator)
    words = re.findall(r"\w+", said[-1]["content"]) if said and own is None else []
    return generator.choice(words or ["hello"]) if own is None else str(own)


def _outcome(played: Sequence[Played]) -> Outcome:
    errors = [result.error for result in played if result.error]
    clean = [(result.reward, result.turns) for result in played if not result.error]
    reward, turns = np.mean(clean or [(0.0, 0)], axis=0).tolist()
    return Outcome(reward, turns, len(played), len(errors), errors[0] if errors else "")
