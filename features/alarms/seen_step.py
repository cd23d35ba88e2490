"""Holds what every rule is given of a step: `SeenStep`, with the metrics of the steps before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from data.protocol import DataProto
from training.batch.episode_rows import EpisodeRows
from training.config import PPOConfig
from training.observers import ObservedRun

Metrics = Mapping[str, float]
# Steps that are remembered.
MEMORY = 20
# Metrics that a run which goes on compares with those of before: they are the policy's. Seconds and
# memory are the machine's, which may be another.
KEPT = (
    "actor/ppo_kl",
    "actor/kl_loss",
    "actor/reward_kl_penalty",
    "actor/entropy",
    "canary/actor_moved",
)


class History:
    """Holds the metrics of the last steps, the latest last."""

    def __init__(self) -> None:
        self._steps: deque[Metrics] = deque(maxlen=MEMORY)

    def add(self, metrics: Metrics) -> None:
        """Adds a step."""
        self._steps.append(metrics)

    def values(self, name: str) -> list[float]:
        """Lists a metric's values in the steps that have it."""
        return [metrics[name] for metrics in self._steps if name in metrics]

    def state(self) -> list[dict[str, float]]:
        """Returns what a checkpoint keeps: KEPT of each step that has some of them."""
        steps = []
        for metrics in self._steps:
            kept = {name: float(metrics[name]) for name in KEPT if name in metrics}
            if kept:
                steps.append(kept)
        return steps


@dataclass(frozen=True, kw_only=True)
class SeenStep:
    """Holds a step that was made. Rules read it and write nothing.

    Attributes:
        run: what is known of the run.
        step: the step's number.
        batch: what it generated and scored.
        updated: the rows that its updates were given, which may be others.
        episodes: the batch's rows (B) by their episodes.
        metrics: the step's, with `perf/driver_memory_gib`.
        history: the metrics of the steps before.
        given: (B,) float64, what each row was given before anything was made of it; None: not
            known.
    """

    run: ObservedRun
    step: int
    batch: DataProto
    updated: DataProto
    episodes: EpisodeRows
    metrics: Metrics
    history: History
    given: Tensor | None = None

    @property
    def config(self) -> PPOConfig:
        """Returns the run's settings."""
        return self.run.config

    def played_episodes(self) -> Iterator[tuple[list[int], dict[str, Any]]]:
        """Yields the rows and the facts of the episodes in environments that are trained on."""
        facts = self.batch.non_tensor_batch.get("episode_facts")
        if facts is None:
            return
        is_live = self.batch.batch["response_mask"].any(1).tolist()
        # Several agents of an episode share its facts.
        episodes = EpisodeRows(self.batch, by_conversation=False)
        is_real = episodes.real.tolist()
        for rows in episodes.rows:
            known = facts[rows[0]]
            if known and is_real[rows[0]] and any(is_live[row] for row in rows):
                yield rows, known
