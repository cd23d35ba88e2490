"""Counts the tokens that an update computes, and those of them that differ.

Rows of one group, or of one episode, begin alike. The least that an update can compute is each
different beginning once; what it computes beyond is padding, beginnings that several micro-batches
need, and those whose copied keys would cost more than the tokens (shared_prefix.py):

    rows of a mini-batch        a b c d    a b c e    a b f      11 tokens, 6 different
    micro-batches of two rows   [a b c d|e]  [a b f]              8 tokens computed, 8 / 6 = 1.33

Invariant: every rank counts its own rows, so that what rows of two ranks share counts twice.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from data.protocol import DataProto
from training.config import PPOConfig
from workers.model.loss_fields import LossFields
from workers.model.probe import (
    LossOf,
    MicroBatch,
    MiniBatch,
    SummingProbe,
    TrainedModel,
    UpdateProbe,
)
from workers.model.shared_prefix import count_unique


class TokenCounts(SummingProbe):
    """Measures MODEL/computed_tokens, MODEL/unique_tokens and MODEL/computed_per_unique_token.

    The first two are means over a step's updates.
    """

    def __init__(self) -> None:
        super().__init__()
        # Of the mini-batch that is under way: the tokens of each row.
        self._rows: list[np.ndarray] = []

    def begin(self, model: TrainedModel, mini: MiniBatch) -> None:
        """Forgets the rows of another mini-batch."""
        super().begin(model, mini)
        self._rows = []

    def before_backward(
        self, micro: MicroBatch, fields: LossFields, outputs: Mapping[str, Tensor], loss: Tensor
    ) -> None:
        """Counts a micro-batch, and keeps its rows' tokens; those that only pad have none."""
        assert micro.layout is not None
        # The ranks of a sequence-parallel group have a part of the tokens each.
        tokens = micro.layout.input_ids.numel() * self.model.settings.sequence_ranks
        computed = torch.tensor(float(tokens))
        self.sums.add({f"{self.model.name}/computed_tokens": computed}, self.mini.weight)
        if len(micro.places):
            self._rows += tokens_of(micro.rows)

    def before_step(self, model: TrainedModel, mini: MiniBatch, loss_of: LossOf) -> None:
        """Counts what differs in the whole mini-batch."""
        unique = torch.tensor(float(count_unique(self._rows)))
        self.sums.add({f"{model.name}/unique_tokens": unique}, self.mini.weight)
        self._rows = []

    def metrics_of(self, totals: dict[str, float]) -> dict[str, float]:
        """Adds the ratio of both."""
        ratios = {}
        for name, unique in totals.items():
            model, _, what = name.partition("/")
            if what == "unique_tokens":
                computed = totals[f"{model}/computed_tokens"]
                ratios[f"{model}/computed_per_unique_token"] = computed / max(unique, 1.0)
        return totals | ratios


def tokens_of(rows: DataProto) -> list[np.ndarray]:
    """Returns the tokens of each row without padding: (length,) integers."""
    ids = torch.cat([rows.batch["prompts"], rows.batch["responses"]], dim=1).numpy()  # (B, P + R)
    attended = rows.batch["attention_mask"].bool().numpy()
    return [row[real] for row, real in zip(ids, attended, strict=True)]


def update_probes(config: PPOConfig, role: str) -> list[UpdateProbe]:
    """Counts in every run, of actor and critic."""
    return [TokenCounts()]
