"""Plans how a step's batch is cut: into mini-batches, over ranks, and into micro-batches on a rank.

The config computes the plan once (`PPOConfig.batch_plan`); driver and workers follow it, and none
of them changes it.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Self

from training.config.section import Section


class MicroBatching(Section):
    """Limits a micro-batch on one rank: either by a token budget or by a number of rows."""

    max_token_len: int | None = None
    micro_batch_size: int | None = None

    def halved(self, longest: int) -> Self:
        """Returns half of the limit: at least the `longest` row's tokens, or one row."""
        tokens = self.max_token_len
        if tokens:
            tokens = min(tokens, max(tokens // 2, longest))
        rows = self.micro_batch_size
        if rows:
            rows = max(rows // 2, 1)
        return replace(self, max_token_len=tokens, micro_batch_size=rows)

    def problems_of_pass(self, key: str, row_length: int) -> Iterator[str]:
        """Yields what keeps a pass from being cut; the names of its settings begin with `key`.

        A token budget must hold at least one full row, of `row_length` tokens.
        """
        if self.max_token_len is not None and self.max_token_len < row_length:
            yield (
                f"{key}_max_token_len_per_gpu={self.max_token_len} cannot hold one row of "
                f"data.max_prompt_length + data.max_response_length = {row_length} tokens"
            )
        if self.max_token_len is None and self.micro_batch_size is None:
            yield (
                f"{key}_micro_batch_size_per_gpu=null: give a number of rows, or "
                "use_dynamic_bsz=true"
            )


def choose_micro_batching(
    use_dynamic_bsz: bool | None, micro_batch_size: int | None, max_token_len: int
) -> MicroBatching:
    """Chooses between a token budget and a number of rows.

    Args:
        use_dynamic_bsz: take the token budget; None: unless a micro-batch size is given.
        micro_batch_size: rows.
        max_token_len: tokens.
    """
    if use_dynamic_bsz is None:
        use_dynamic_bsz = micro_batch_size is None
    if use_dynamic_bsz:
        return MicroBatching(max_token_len=max_token_len)
    return MicroBatching(micro_batch_size=micro_batch_size)


class UpdatePlan(Section):
    """Plans how a model passes over the rows of its rank: `epochs` times, in equal mini-batches."""

    mini_batches: int
    epochs: int = 1
    shuffle: bool = False

    @classmethod
    def of_rows(
        cls, rows: int, mini_batch_rows: int, epochs: int = 1, shuffle: bool = False
    ) -> Self:
        """Plans mini-batches of so many rows, or all there are.

        Raises:
            ValueError: the mini-batches do not divide the rows.
        """
        mini_batch_rows = min(mini_batch_rows, rows)
        if mini_batch_rows < 1 or rows % mini_batch_rows:
            raise ValueError(
                f"a batch of {rows} rows (prompts x n) does not divide into mini-batches of "
                f"{mini_batch_rows}; choose a ppo_mini_batch_size that divides "
                "data.train_batch_size"
            )
        return cls(mini_batches=rows // mini_batch_rows, epochs=epochs, shuffle=shuffle)

    @property
    def updates(self) -> int:
        """Counts the optimiser steps.

        With a single one the policy that is updated is still the one that sampled.
        """
        return self.epochs * self.mini_batches


class BatchPlan(Section):
    """Plans how a step of `prompts` prompts is cut over data-parallel ranks and into mini-batches.

    `balance` gives the ranks of a part about the same number of tokens; otherwise rows stay in
    order. The driver arranges the rows by the plan, once for both models, so that one of the two
    sizes must divide the other, and hands it to the workers, which cut what reaches them into as
    many equal parts. With 12 prompts, rollout.n=2, mini-batches of 6 prompts for the actor and of
    3 for the critic, and 2 ranks, a part is 3 prompts, that is 6 rows, of which 3 are on each rank:

        parts of the batch     |  p0 p1 p2  |  p3 p4 p5  |  p6 p7 p8  |  p9 p10 p11 |
        critic: 4 mini-batches |     0      |     1      |     2      |      3      |
        actor:  2 mini-batches |            0            |            1             |
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
