"""Canaries: a few fixed sequences that the actor and the engine score after every sync of weights.

An engine that keeps old weights, or gets a tensor wrong, still writes fluent text; nothing but its
numbers tells. The sequences are the same in every run of a model, and scoring them changes no
generator and no weight.
"""

import logging
import math
import zlib
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor

from data.protocol import DataProto
from data.turn_tokens import encode_chat
from training.config import MicroBatching, PPOConfig
from workers.model.banned_tokens import banned_token_ids
from workers.model.builder import ModelSpec
from workers.model.probe import Measured, SyncProbe
from workers.rollout.base_rollout import BaseRollout

logger = logging.getLogger(__name__)

SEQUENCES = 4
# Tokens of a sequence.
LENGTH = 24
# A prompt and an answer, and an engine samples a token behind them.
SHORTEST_ROW = 3
# The chat template is compared by what it makes of these.
CONVERSATION = [
    {"role": role, "content": f"the {role} speaks"}
    for role in ("system", "user", "assistant", "user")
]


class ScoringEngine(Protocol):
    """Scores sequences: what a rollout engine can do for a canary."""

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Returns the log-probs of each sequence's tokens but the first."""


def open_canary(config: PPOConfig, spec: ModelSpec, engine: Any) -> list[SyncProbe]:
    """Makes the probe; none, with a warning, where the engine cannot score the sequences."""
    scores_nothing = engine is not None and type(engine).score is BaseRollout.score
    if scores_nothing or config.max_model_len < SHORTEST_ROW:
        logger.warning(
            "rollout.name=%s scores nothing: no alarm watches the weight sync",
            config.actor_rollout_ref.rollout.name,
        )
        return []
    template_kwargs = config.data.apply_chat_template_kwargs
    return [
        Canary(
            config.max_model_len,
            len(spec.tokenizer),
            partial(encode_chat, spec.tokenizer, **template_kwargs),
            limits=config.actor_rollout_ref.log_prob_micro_batching,
            banned_token_ids=banned_token_ids(config.actor_rollout_ref.rollout, spec),
        )
    ]


class Canary(SyncProbe):
    """Compares what actor and engine make of the sequences, and how far each moved.

    Args:
        max_model_len: tokens of the longest row that the engine holds.
        vocab_size: ids are drawn below it.
        render: conversation -> token ids, by the rank's own chat template.
        limits: of the actor's micro-batches; None: its update's own.
        banned_token_ids: ids that are never sampled, which have no log-prob.
    """

    def __init__(
        self,
        max_model_len: int,
        vocab_size: int,
        render: Callable[..., list[int]],
        limits: MicroBatching | None = None,
        banned_token_ids: Collection[int] = (),
    ) -> None:
        self.render = render
        self.limits = limits
        # A place is left for the token that an engine samples behind what it scores.
        length = min(LENGTH, max_model_len - 1)
        generator = torch.Generator().manual_seed(0)
        banned = set(banned_token_ids)
        allowed = [token for token in range(vocab_size) if token not in banned]
        drawn = torch.randint(len(allowed), (SEQUENCES, length), generator=generator)
        self.ids = torch.tensor(allowed)[drawn]
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

    def weights_sent(self, actor: Any) -> Tensor:
        """Computes the actor's log-probs of `batch`: (rows, length - 1), nats."""
        log_probs, _ = actor.compute_log_prob(self.batch(), limits=self.limits)
        return log_probs

    def weights_taken(self, engine: ScoringEngine, sent: Tensor) -> Measured:
        """Scores the sequences with the engine and compares with the actor's log-probs.

        Returns:
            Means over tokens in nats, of the rank that is worst: `canary/difference` between the
            two, and from the second time on `canary/actor_moved`, `canary/engine_moved` (of the
            rank that moved least) and `canary/lag`, the difference between the two movements;
            `canary/actor_moved_in_all` and `canary/lag_in_all`, the same since the first time;
            `canary/template`, a number that stands for the chat template; `perf/rank_memory_gib`,
            the host memory of the largest rank.
        """
        scored = torch.tensor(engine.score(self.ids.tolist()))
        metrics = {"canary/difference": mean_abs(scored - sent)}
        if self.last_engine is not None and self.last_actor is not None:
            engine_moved = scored - self.last_engine
            actor_moved = sent - self.last_actor
            metrics["canary/lag"] = mean_abs(engine_moved - actor_moved)
            metrics["canary/actor_moved"] = mean_abs(actor_moved)
            # The maximum over ranks of the negative: the rank that moved least.
            metrics["canary/engine_moved"] = -mean_abs(engine_moved)
        if self.first_engine is None or self.first_actor is None:
            self.first_engine = scored
            self.first_actor = sent
        else:
            actor_moved = sent - self.first_actor
            metrics["canary/actor_moved_in_all"] = mean_abs(actor_moved)
            metrics["canary/lag_in_all"] = mean_abs(scored - self.first_engine - actor_moved)
        self.last_engine = scored
        self.last_actor = sent
        metrics["canary/template"] = self._template_checksum()
        metrics["perf/rank_memory_gib"] = psutil.Process().memory_info().rss / 2**30
        return Measured(maxima={name: torch.tensor(value) for name, value in metrics.items()})

    def metrics_of(self, totals: dict[str, float]) -> dict[str, float]:
        """Turns the sign of what was negated."""
        if "canary/engine_moved" in totals:
            totals["canary/engine_moved"] = abs(totals["canary/engine_moved"])
        return totals

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
