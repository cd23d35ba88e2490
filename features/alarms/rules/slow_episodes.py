"""Looks for a few episodes whose environment, or tool, a whole step waits for.

A step goes on once its last episode has ended, so that it lasts at least as long as the slowest
environment; where few of them run at once, all others wait for those, too. Invariant: only a step
of which a few episodes' environments take a large part counts, and only where it is not the first
one: one may be chance.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from features.alarms.finding import Finding, place_of
from features.alarms.rule import RulesWithMemory, rule
from features.alarms.seen_step import SeenStep
from training.observers import ObservedRun

FEWEST_EPISODES = 8
# A slow episode's environment takes so many times the usual, and at most such a share is slow.
SLOW_FACTOR = 5
MOST_SLOW = 0.25
# Seconds that they take more than is usual, and the share of the step that these are.
LEAST_WAIT_S = 1.0
LEAST_SHARE = 0.4
# FEWEST_STEPS of the last STEPS steps wait.
STEPS = 10
FEWEST_STEPS = 2
# So many seeds are named.
MOST_SEEDS = 4


class PlayedEpisode(NamedTuple):
    """Holds an episode: its first row, its environment's seconds, and its calls."""

    row: int
    env_seconds: float
    calls: Sequence[dict[str, Any]]


class SlowEpisodeRules(RulesWithMemory):
    """Watches for how long steps wait for a few episodes."""

    def __init__(self, run: ObservedRun) -> None:
        super().__init__(run)
        # Whether each of the last steps waited.
        self.waited: deque[bool] = deque(maxlen=STEPS)

    @rule(
        "episodes_slow",
        advice=(
            "what reset, step or the tool does for these tasks; agent.step_timeout_s bounds a "
            "call, and trainer.async_level=1 plays the next step meanwhile"
        ),
        view="sort=-seconds",
        order=335,
    )
    def slow_episodes(self, seen: SeenStep) -> Iterator[Finding]:
        """Finds steps that wait for a few episodes, where another one did so not long ago."""
        trainer = seen.config.trainer
        if trainer.async_level > 0 or trainer.train_finished_groups:
            return
        episodes = [
            PlayedEpisode(rows[0], facts["env_seconds"], facts["tool_calls"])
            for rows, facts in seen.played_episodes()
        ]
        step_seconds = seen.metrics.get("timing_s/step", 0.0)
        slow = slow_ones(episodes)
        wait = waited_for(episodes, slow)
        is_held = wait >= max(LEAST_WAIT_S, LEAST_SHARE * step_seconds)
        self.waited.append(is_held)
        if is_held and sum(self.waited) >= FEWEST_STEPS:
            slowest = max(slow, key=lambda episode: episode.env_seconds)
            usual = median(episode.env_seconds for episode in episodes)
            yield Finding(
                "episodes_slow",
                f"{len(slow)} of {len(episodes)} episodes{_seeds(seen, slow)} took up to "
                f"{slowest.env_seconds:.2g} s in their environment{_tool_of(slow)}, where "
                f"{usual:.2g} s is usual: the step, of {step_seconds:.2g} s, waits for them, as "
                f"did {sum(self.waited)} of {len(self.waited)} steps",
                place_of(seen.batch, slowest.row),
            )


def slow_ones(episodes: Sequence[PlayedEpisode]) -> list[PlayedEpisode]:
    """Lists the episodes whose environment took far longer than usual; nothing where many did."""
    if len(episodes) < FEWEST_EPISODES:
        return []
    usual = median(episode.env_seconds for episode in episodes)
    slow = [episode for episode in episodes if episode.env_seconds > SLOW_FACTOR * usual]
    return slow if len(slow) <= MOST_SLOW * len(episodes) else []


def waited_for(episodes: Sequence[PlayedEpisode], slow: Sequence[PlayedEpisode]) -> float:
    """Returns the seconds that the slowest environment took more than is usual."""
    if not slow:
        return 0.0
    usual = median(episode.env_seconds for episode in episodes)
    return max(episode.env_seconds for episode in slow) - usual


def _seeds(seen: SeenStep, slow: Sequence[PlayedEpisode]) -> str:
    """Names the seeds of slow episodes."""
    column = seen.batch.non_tensor_batch.get("env_seed")
    if column is None:
        return ""
    seeds = list(dict.fromkeys(str(column[episode.row]) for episode in slow))
    more = ", …" if len(seeds) > MOST_SEEDS else ""
    word = "seed" if len(seeds) == 1 else "seeds"
    return f" ({word} {', '.join(seeds[:MOST_SEEDS])}{more})"


def _tool_of(slow: Sequence[PlayedEpisode]) -> str:
    """Names the tool that took most of the slow episodes' time; "": none did."""
    seconds: dict[str, float] = defaultdict(float)
    for episode in slow:
        for call in episode.calls:
            seconds[call["name"]] += call["seconds"]
    if not seconds:
        return ""
    name = max(seconds, key=lambda name: seconds[name])
    is_most = seconds[name] > 0.5 * sum(episode.env_seconds for episode in slow)
    return f", most of it in the tool {name}" if is_most else ""
