"""Canaries: a few fixed sequences that the actor and the engine score after every sync of weights.

An engine that keeps old weights, or gets a tensor wrong, still writes fluent text; nothing but its
numbers tells. The sequences are the same in every run of a model, and scoring them changes no
generator and no weight.
"""

import math
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import psutil
import torch
from torch import Tensor

from data.protocol import DataProto
from workers.ranks.process_groups import max_over_ranks

SEQUENCES = 4
# Tokens of a sequence.
LENGTH = 24
# The chat template is compared by what it makes of these.
CONVERSATION = [
    {"role": role, "content": f"the {role} speaks"}
    for role in ("system", "user", "assistant", "user")
]


class ScoringEngine(Protocol):
    """Scores sequences: what a rollout engine can do for a canary."""

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Returns the log-probs of each sequence's tokens but the first."""


class Canary:
    """Compares what actor and engine make of the sequences, and how far each moved.

    Args:
        max_model_len: tokens of the longest row that the engine holds.
        vocab_size: ids are drawn below it.
        render: conversation -> token ids, by the rank's own chat template.
    """

    def __init__(
        self, max_model_len: int, vocab_size: int, render: Callable[..., list[int]]
    ) -> None:
        self.render = render
        # A place is left for the token that an engine samples behind what it scores.
        length = min(LENGTH, max_model_len - 1)
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(vocab_size, (SEQUENCES, length), generator=generator)
        # The log-probs of the last comparison, each (rows, length - 1).
        self.last_engine: Tensor | None = None
        self.last_actor: Tensor | None = None
        # Those of the first.
        self.first_engine: Tensor | None = None
        self.first_actor: Tensor | None = None

    def batch(self) -> DataProto:
        """Returns the sequences as rows, whose first token is the prompt; at temperature 1."""
        ids = self.ids.int()
        mask = torch.ones_like(ids, dtype=torch.int8)
        tensors = {
            "prompts": ids[:, :1],
            "responses": ids[:, 1:],
            "response_mask": mask[:, 1:],
            "attention_mask": mask,
        }
        return DataProto.from_dict(tensors=tensors, meta_info={"temperature": 1.0})

    def compare(self, engine: ScoringEngine, actor: Tensor) -> dict[str, float]:
        """Scores the sequences with the engine and compares with the actor's log-probs of `batch`.

        Args:
            actor: (rows, length - 1), nats.

        Returns:
            Means over tokens in nats, of the rank that is worst: `canary/difference` between the
            two, and from the second time on `canary/actor_moved`, `canary/engine_moved` (of the
            rank that moved least) and `canary/lag`, the difference between the two movements;
            `canary/actor_moved_in_all` and `canary/lag_in_all`, the same since the first time;
            `canary/template`, a number that stands for the chat template; `perf/rank_memory_gib`,
            the host memory of the largest rank.
        """
        scored = torch.tensor(engine.score(self.ids.tolist()))
        metrics = {"canary/difference": mean_abs(scored - actor)}
        if self.last_engine is not None and self.last_actor is not None:
            engine_moved = scored - self.last_engine
            actor_moved = actor - self.last_actor
            metrics["canary/lag"] = mean_abs(engine_moved - actor_moved)
            metrics["canary/actor_moved"] = mean_abs(actor_moved)
            # The maximum over ranks of the negative: the rank that moved least.
            metrics["canary/engine_moved"] = -mean_abs(engine_moved)
        if self.first_engine is None or self.first_actor is None:
            self.first_engine = scored
            self.first_actor = actor
        else:
            actor_moved = actor - self.first_actor
            metrics["canary/actor_moved_in_all"] = mean_abs(actor_moved)
            metrics["canary/lag_in_all"] = mean_abs(scored - self.first_engine - actor_moved)
        self.last_engine = scored
        self.last_actor = actor
        metrics["canary/template"] = self._template_checksum()
        metrics["perf/rank_memory_gib"] = psutil.Process().memory_info().rss / 2**30
        worst = max_over_ranks(torch.tensor(list(metrics.values()))).tolist()
        metrics = dict(zip(metrics, worst, strict=True))
        if "canary/engine_moved" in metrics:
            metrics["canary/engine_moved"] = abs(metrics["canary/engine_moved"])
        return metrics

    def _template_checksum(self) -> float:
        """Returns a number that stands for the chat template; float32 holds it exactly."""
        rendered: list[int] = []
        # A tokenizer without a template, or one that refuses such a conversation.
        with suppress(Exception):
            rendered = self.render(CONVERSATION)
        return float(zlib.crc32(str(rendered).encode()) % 2**24)


def mean_abs(values: Tensor) -> float:
    """Returns the mean absolute value; infinite where a number is not one."""
    mean = values.abs().mean().item()
    return math.inf if math.isnan(mean) else mean
