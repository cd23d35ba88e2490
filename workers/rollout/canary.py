"""Canaries: a few fixed sequences that the actor and the rollout engine score after every weight sync.

An engine that keeps old weights, or gets a tensor wrong, still writes fluent text; nothing but its numbers tells.
Invariant: the sequences are the same in every run of a model, and scoring them changes no generator and no weight.
"""

import zlib
from collections.abc import Callable
from contextlib import suppress

import psutil
import torch
from torch import Tensor

from data.protocol import DataProto
from workers.ranks.distributed import max_over_ranks
from workers.rollout.base import BaseRollout

SEQUENCES = 4
LENGTH = 24
CONVERSATION = [{"role": role, "content": f"the {role} speaks"} for role in ("system", "user", "assistant", "user")]


class Canary:
    """Compares what the two make of the sequences, and how far each moved since they were last compared.

    Args:
        engine: scores by `score`.
        vocab_size: ids are drawn below it.
        render: conversation -> token ids, by the rank's own chat template.
    """

    def __init__(self, engine: BaseRollout, vocab_size: int, render: Callable[..., list[int]]) -> None:
        self.engine, self.render = engine, render
        # A place is left for the token that an engine samples behind what it scores.
        length = min(LENGTH, engine.max_model_len - 1)
        self.ids = torch.randint(vocab_size, (SEQUENCES, length), generator=torch.Generator().manual_seed(0))
        self.last: tuple[Tensor, Tensor] | None = None

    def batch(self) -> DataProto:
        """Returns the sequences as rows, whose first token is the prompt; at temperature 1."""
        ids = self.ids.int()
        mask = torch.ones_like(ids, dtype=torch.int8)
        tensors = {"prompts": ids[:, :1], "responses": ids[:, 1:], "response_mask": mask[:, 1:], "attention_mask": mask}
        return DataProto.from_dict(tensors=tensors, meta_info={"temperature": 1.0})

    def compare(self, actor: Tensor) -> dict[str, float]:
        """Scores the sequences with the engine and compares with the actor's log-probs of `batch`, (rows, length - 1).

        Returns: means over tokens in nats, of the rank that is worst: `canary/difference` between the two, and from
            the second time on `canary/actor_moved`, `canary/engine_moved` (of the rank that moved least) and
            `canary/lag`, the difference between the two movements; `canary/template`, a number that stands for the chat
            template; `perf/rank_memory_gib`, the host memory of the largest rank.
        """
        engine = torch.tensor(self.engine.score(self.ids.tolist()))
        found = {"canary/difference": distance(engine, actor)}
        if self.last is not None:
            moved, actor_moved = engine - self.last[0], actor - self.last[1]
            found |= {"canary/lag": distance(moved, actor_moved), "canary/actor_moved": distance(actor_moved)}
            found["canary/engine_moved"] = -distance(moved)
        self.last = engine, actor
        rendered: list[int] = []
        # A tokenizer without a template, or one that refuses such a conversation.
        with suppress(Exception):
            rendered = self.render(CONVERSATION)
        found["canary/template"] = float(zlib.crc32(str(rendered).encode()) % 2**24)
        found["perf/rank_memory_gib"] = psutil.Process().memory_info().rss / 2**30
        worst = dict(zip(found, max_over_ranks(torch.tensor([*found.values()])).tolist(), strict=True))
        return {name: abs(value) if name == "canary/engine_moved" else value for name, value in worst.items()}


def distance(one: Tensor, other: Tensor | float = 0.0) -> float:
    """Returns the mean absolute difference; infinite where a number is not one."""
    value = (one - other).abs().mean().item()
    return value if value == value else float("inf")
