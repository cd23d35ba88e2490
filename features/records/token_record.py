"""What an update made of each token: its log-prob, its entropy, and how much it was trained on.

A loss reaches a token by its log-prob alone, so that minus the loss's derivative by it says how
much, and in which direction, the token was trained on. Rows are known by `row_number`, as
mini-batches, micro-batches and ranks cut and order them anew. Invariant: what is recorded is read
and never changed, and rows that only pad (dummies, a rank's repeated row) are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.protocol import DataProto
from workers.model.sequences import to_device
from workers.ranks.process_groups import rank, world_size

ROW_NUMBER = "row_number"


@dataclass(frozen=True)
class UpdateRecord:
    """Holds what one rank's update made of its rows, in passes over rows (P) and their tokens (T).

    A row is there once for each pass over it in the last epoch; `row_numbers` and `passes` are
    (P,), with the number of the pass's mini-batch; `lengths` (P,) counts each row's tokens in
    `tokens`, by name (T,) float32: `log_prob`, `entropy`, `policy_weight` (the derivative by the
    log-prob, its sign turned), and `rollout_is_weights` where the update made them.

    Attributes:
        times_trained: passes over each row in all epochs, by row number.
        skipped: mini-batches whose update was skipped, as its gradient was not finite.
        gradient_shares: each row's share of the gradients, by row number.
    """

    row_numbers: np.ndarray
    passes: np.ndarray
    lengths: np.ndarray
    tokens: dict[str, np.ndarray]
    times_trained: dict[int, int]
    skipped: tuple[int, ...] = ()
    gradient_shares: dict[int, float] = field(default_factory=dict)


@dataclass
class _Pass:
    """Holds a micro-batch's rows: their numbers, their tokens' count, and values on the device."""

    mini_batch: int
    row_numbers: np.ndarray
    lengths: np.ndarray
    values: dict[str, Tensor]


class TokenRecorder:
    """Collects what an update makes of its tokens, on one rank.

    Args:
        sequence_ranks: ranks that share each sequence, of which the first one records.
    """

    def __init__(self, sequence_ranks: int = 1) -> None:
        self.sequence_ranks = sequence_ranks
        self._mini_batch = 0
        self._keeps_values = True
        self._passes: list[_Pass] = []
        # The rows of each mini-batch, of every epoch.
        self._seen: dict[int, list[np.ndarray]] = {}
        self._skipped: list[int] = []
        self.gradient_shares: dict[int, float] = {}

    def clear(self) -> None:
        """Forgets what was recorded."""
        self._passes = []
        self._seen = {}
        self._skipped = []
        self.gradient_shares = {}

    def begin(self, mini_batch: int, *, keeps_values: bool) -> None:
        """Begins a mini-batch, maybe once more; only the last epoch's values are kept."""
        self._mini_batch = mini_batch
        self._keeps_values = keeps_values
        self._passes = [each for each in self._passes if each.mini_batch != mini_batch]
        self._seen[mini_batch] = []

    def see(self, micro: DataProto, rows: Tensor, tokens: dict[str, Tensor]) -> None:
        """Records a micro-batch, whose backward pass is to come.

        Args:
            micro: its rows.
            rows: their places in the mini-batch; empty where the micro-batch only pads.
            tokens: values by name, (rows, response_len) each; `log_prob` with a gradient.
        """
        shares_with_another = rank() % self.sequence_ranks != 0
        numbers = micro.batch.get(ROW_NUMBER, None)
        if shares_with_another or len(rows) == 0 or numbers is None:
            return
        row_numbers = numbers.numpy()
        self._seen.setdefault(self._mini_batch, []).append(row_numbers)
        if not self._keeps_values:
            return
        # Not a dummy's.
        is_real = row_numbers >= 0
        log_prob = tokens["log_prob"]
        width = log_prob.shape[1]
        attended = micro.batch["attention_mask"].numpy()[:, -width:] != 0  # (rows, R)
        attended &= is_real[:, None]
        # Among all (rows x R) tokens.
        places = to_device(torch.from_numpy(np.flatnonzero(attended)), log_prob.device)
        values = {}
        for name, value in tokens.items():
            values[name] = value.detach().take(places)
        lengths = attended.sum(axis=1)[is_real]
        self._passes.append(_Pass(self._mini_batch, row_numbers[is_real], lengths, values))

        def keep_weight(gradient: Tensor) -> None:
            # Losses carry the factor of all ranks.
            values["policy_weight"] = gradient.detach().take(places) / -world_size()

        if log_prob.requires_grad:
            log_prob.register_hook(keep_weight)

    def add_gradient_shares(self, mini: DataProto, shares: Tensor) -> None:
        """Adds the shares (rows,) that a mini-batch's rows have of its gradient."""
        numbers = mini.batch[ROW_NUMBER].tolist()
        for number, share in zip(numbers, shares.tolist(), strict=True):
            # Not a dummy's.
            if number >= 0:
                self.gradient_shares[number] = self.gradient_shares.get(number, 0.0) + share

    def skip(self) -> None:
        """Notes that the mini-batch's update was skipped."""
        self._skipped.append(self._mini_batch)

    def divide(self, divisor: float) -> None:
        """Divides the weights, where the gradient was a sum that is divided at the end."""
        for each in self._passes:
            if "policy_weight" in each.values:
                each.values["policy_weight"] = each.values["policy_weight"] / divisor

    def take(self) -> UpdateRecord | None:
        """Returns what was recorded, on the CPU, and forgets it; None where there is nothing."""
        passes = self._passes
        if not passes:
            self.clear()
            return None
        names = [name for name in passes[0].values if all(name in p.values for p in passes)]
        seen = [rows for of_mini_batch in self._seen.values() for rows in of_mini_batch]
        numbers, counts = np.unique(np.concatenate(seen), return_counts=True)
        # Not of dummies.
        numbers, counts = numbers[numbers >= 0], counts[numbers >= 0]
        record = UpdateRecord(
            row_numbers=np.concatenate([each.row_numbers for each in passes]),
            passes=np.concatenate(
                [np.full(len(each.row_numbers), each.mini_batch) for each in passes]
            ),
            lengths=np.concatenate([each.lengths for each in passes]),
            tokens={
                name: torch.cat([each.values[name] for each in passes]).float().cpu().numpy()
                for name in names
            },
            times_trained=dict(zip(numbers.tolist(), counts.tolist(), strict=True)),
            skipped=tuple(self._skipped),
            gradient_shares=dict(self.gradient_shares),
        )
        self.clear()
        return record


def token_records(records: Sequence[Mapping[str, Any]]) -> list[UpdateRecord | None]:
    """Picks each rank's record of tokens out of the records of all probes; None: it has none."""
    return [of_rank.get("TokenRecorder") for of_rank in records]
