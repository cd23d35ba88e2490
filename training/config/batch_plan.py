"""Describes how a step's batch is cut: over ranks, into mini-batches, and those into micro-batches.

`PPOConfig.batch_plan` (settings.py) computes the plan once. The driver arranges the rows by it and hands it to the
workers, which cut what reaches them into as many equal parts. With 12 prompts, rollout.n=2, mini-batches of 6 prompts
for the actor and of 3 for the critic, and 2 ranks, a part is 3 prompts, that is 6 rows, of which 3 are on each rank:

    parts of the batch     |  p0 p1 p2  |  p3 p4 p5  |  p6 p7 p8  |  p9 p10 p11 |
    critic: 4 mini-batches |     0      |     1      |     2      |      3      |
    actor:  2 mini-batches |            0            |            1             |

The rows are arranged once for both models, so one of the two sizes must divide the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from data.texts import say


@dataclass(frozen=True, kw_only=True)
class MicroBatching:
    """Limits a micro-batch on one rank, by a token budget or by a number of rows; exactly one is set."""

    max_token_len: int | None = None
    micro_batch_size: int | None = None


def micro_batching(use_dynamic_bsz: bool | None, micro_batch_size: int | None, max_token_len: int) -> MicroBatching:
    """Takes the token budget where `use_dynamic_bsz` says so; None means unless a micro-batch size (rows) is given."""
    if use_dynamic_bsz or (use_dynamic_bsz is None and micro_batch_size is None):
        return MicroBatching(max_token_len=max_token_len)
    return MicroBatching(micro_batch_size=micro_batch_size)


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """Says how one model passes over the rows of its rank: `epochs` times, in `mini_batches` equal parts each."""

    mini_batches: int
    epochs: int = 1
    shuffle: bool = False

    @classmethod
    def of_rows(cls, rows: int, mini_batch_rows: int, epochs: int = 1, shuffle: bool = False) -> UpdatePlan:
        """Plans mini-batches of so many rows, or all there are. Raises ValueError unless that divides the rows."""
        mini_batch_rows = min(mini_batch_rows, rows)
        if mini_batch_rows < 1 or rows % mini_batch_rows:
            raise ValueError(say("rows_left_over", rows=rows, size=mini_batch_rows))
        return cls(mini_batches=rows // mini_batch_rows, epochs=epochs, shuffle=shuffle)

    @property
    def updates(self) -> int:
        """Counts the optimiser steps; with a single one the policy that is updated is still the one that sampled."""
        return self.epochs * self.mini_batches


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Says how a step of `prompts` prompts is cut over `ranks` data-parallel ranks and into mini-batches.

    `balance` gives the ranks of a part about the same number of tokens; otherwise rows stay in order.
    """

    prompts: int
    ranks: int
    balance: bool
    actor: UpdatePlan
    critic: UpdatePlan

    @property
    def parts(self) -> int:
        """Counts the smallest mini-batches of a step; each larger one is several of them."""
        return max(self.actor.mini_batches, self.critic.mini_batches)
