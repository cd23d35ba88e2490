"""Adds the rows of continuations to those that a step's updates learn from (branching.train=true).

    the step's rows, with advantages          e0 e1 e2 …
    behind the estimator, before the update   e0 e0#1.0 e0#1.1 e1 e1#1.0 …    by prompts, for ranks

The estimator judges each continuation as a row of its own; metrics, filters and records never see
it. A mean of the update is over its episodes and their own tokens, and not over continuations too:
all advantages of a mini-batch are multiplied by what the means count in it, divided by what its
episodes alone are counted as. Invariant: the expected gradient is that of the episodes; the step's
own batch stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.array_ops import row_sums
from data.chat_templates import pad_token_id
from data.protocol import DUMMY_UID, DataProto
from features.branching.settings import BranchingSettings
from features.branching.trained import BRANCH_ROWS, PackedRow, TrainedBranch
from training.advantage import compute_advantage
from training.batch.rank_layout import arrange
from training.config import BatchPlan, PPOConfig, UpdatePlan
from training.run.worker_group_protocol import PolicyGroup
from training.step_additions import Metrics, StepAddition

SHARE = "episode_share"
# In the batch that updates are given: (B,) bool, which rows are those of continuations.
IS_BRANCH = "is_branch"
# So the names of those aggregations begin whose means are over sequences.
SEQUENCE_MEANS = "seq-mean"


def open_addition(config: PPOConfig, tokenizer: Any) -> BranchRows | None:
    """Opens the addition; None where continuations are not trained on."""
    settings = config.section(BranchingSettings)
    if not (settings.is_on and settings.train):
        return None
    return BranchRows(config, pad_token_id(tokenizer))


@dataclass(frozen=True)
class PlacedRow:
    """Names a row of a continuation, and the row of the batch that its episode begins with."""

    first: int
    branch: TrainedBranch
    number: int
    row: PackedRow


class BranchRows(StepAddition):
    """Adds rows of continuations, with advantages by the run's estimator.

    Args:
        pad_id: fills what is empty.
    """

    name = "branch_rows"

    def __init__(self, config: PPOConfig, pad_id: int) -> None:
        self.config = config
        self.pad_id = pad_id

    def add(self, rows: DataProto, policy: PolicyGroup) -> tuple[DataProto, Metrics]:
        """Returns the rows with those of their continuations, and how many tokens these have."""
        placed = branch_rows_of(rows)
        metrics = {"branching/trained_rows": float(len(placed)), "branching/trained_tokens": 0.0}
        if not placed:
            return rows, metrics
        branches = self._with_advantages(self._laid_out(rows, placed))
        metrics["branching/trained_tokens"] = float(row_sums(branches.batch["response_mask"]).sum())
        if "old_log_probs" in rows.batch:
            branches = self._with_old_log_probs(branches, policy)
        own = rows.drop_dummies()
        if self._means_are_of_sequences:
            if SHARE not in own.batch:
                own.batch[SHARE] = torch.ones(len(own))
            branches.batch[SHARE] = sequence_shares(placed, branches)
        own.non_tensor_batch[IS_BRANCH] = np.zeros(len(own), dtype=bool)
        branches.non_tensor_batch[IS_BRANCH] = np.ones(len(branches), dtype=bool)
        joined = DataProto.concat([own, branches])
        joined.meta_info = rows.meta_info
        arranged = arrange(joined, self.config.batch_plan)
        return self._with_means_of_episodes(arranged), metrics

    @property
    def _means_are_of_sequences(self) -> bool:
        return self.config.actor_rollout_ref.actor.aggregation.startswith(SEQUENCE_MEANS)

    def _laid_out(self, rows: DataProto, placed: Sequence[PlacedRow]) -> DataProto:
        """Lays rows of continuations out in the fields of the step's rows."""
        size = len(placed)
        tensors = {
            name: tensor.new_zeros((size, *tensor.shape[1:]))
            for name, tensor in rows.tensors().items()
        }
        prompt_width = rows.batch["prompts"].shape[1]
        tensors["prompts"].fill_(self.pad_id)
        tensors["responses"].fill_(self.pad_id)
        tensors["turn_ids"].fill_(-1)
        tensors["row_number"].fill_(-1)
        for number, each in enumerate(placed):
            row = each.row
            begin = prompt_width - len(row.prompt_ids)
            end = len(row.ids)
            tensors["prompts"][number, begin:] = torch.from_numpy(row.prompt_ids)
            tensors["responses"][number, :end] = torch.from_numpy(row.ids)
            tensors["attention_mask"][number, begin : prompt_width + end] = 1
            tensors["turn_ids"][number, :end] = torch.from_numpy(row.turn_ids)
            tensors["token_level_rewards"][number, :end] = torch.from_numpy(row.rewards)
            if "rollout_log_probs" in tensors:
                tensors["rollout_log_probs"][number, :end] = torch.from_numpy(row.log_probs)
        tensors["response_mask"] = (tensors["turn_ids"] >= 0).to(rows.batch["response_mask"].dtype)
        return DataProto.from_dict(tensors=tensors, non_tensors=columns_of(rows, placed))

    def _with_advantages(self, branches: DataProto) -> DataProto:
        """Has the estimator judge continuations, each of which is an episode to it."""
        algorithm = self.config.algorithm
        return compute_advantage(
            branches,
            algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=self.config.actor_rollout_ref.rollout.n,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            config=algorithm,
        )

    def _with_old_log_probs(self, branches: DataProto, policy: PolicyGroup) -> DataProto:
        """Adds the log-probs before the update, in the order of the rows."""
        numbered = branches.select()
        numbered.batch["row_number"] = torch.arange(len(branches))
        plan = self.config.batch_plan
        one = UpdatePlan(mini_batches=1)
        spread = arrange(numbered, replace(plan, actor=one, critic=one))
        computed = policy.compute_log_prob(spread).batch["old_log_probs"]
        is_real = spread.non_tensor_batch["uid"].astype(object) != DUMMY_UID
        kept = torch.from_numpy(is_real)
        places = spread.batch["row_number"][kept]
        branches.batch["old_log_probs"][places] = computed[kept].to(
            branches.batch["old_log_probs"].dtype
        )
        return branches

    def _with_means_of_episodes(self, rows: DataProto) -> DataProto:
        """Multiplies advantages so that means count the episodes alone."""
        counts = counted(rows, self.config.actor_rollout_ref.actor.aggregation)  # (B,)
        if counts is None:
            return rows
        is_branch = torch.from_numpy(rows.non_tensor_batch[IS_BRANCH])
        parts = mini_batch_of_row(len(rows), self.config.batch_plan)  # (B,)
        whole = torch.zeros(int(parts.max()) + 1, dtype=torch.float64)
        own = whole.index_add(0, parts, torch.where(is_branch, 0, counts))
        whole = whole.index_add(0, parts, counts)
        factors = torch.where(own > 0, whole / own.clamp(min=1e-9), 1)[parts]
        advantages = rows.batch["advantages"]
        rows.batch["advantages"] = (advantages.double() * factors[:, None]).to(advantages.dtype)
        return rows


def branch_rows_of(rows: DataProto) -> list[PlacedRow]:
    """Lists the rows of continuations whose episode is trained on."""
    columns = rows.non_tensor_batch
    lengths = row_sums(rows.batch["response_mask"]).tolist()
    trained: dict[str, int] = {}
    for episode_id, length in zip(columns["episode_id"], lengths, strict=True):
        trained[str(episode_id)] = trained.get(str(episode_id), 0) + int(length)
    placed = []
    for first, episode_id in enumerate(columns["episode_id"]):
        is_first = int(columns["episode_row"][first]) == 0
        if columns["uid"][first] == DUMMY_UID or not is_first or not trained[str(episode_id)]:
            continue
        for branch in columns[BRANCH_ROWS][first]:
            for number, row in enumerate(branch.rows):
                placed.append(PlacedRow(first, branch, number, row))
    return placed


def columns_of(rows: DataProto, placed: Sequence[PlacedRow]) -> dict[str, np.ndarray]:
    """Makes the columns of continuations' rows: their episode's, but for what is their own."""
    first = np.array([each.first for each in placed], dtype=np.int64)
    columns = {name: values[first] for name, values in rows.non_tensor_batch.items()}

    def objects(values: Sequence[Any]) -> np.ndarray:
        column = np.empty(len(placed), dtype=object)
        for number, value in enumerate(values):
            column[number] = value
        return column

    names = rows.non_tensor_batch["episode_id"]
    columns["episode_id"] = objects([f"{names[each.first]}#{each.branch.word}" for each in placed])
    columns["episode_row"] = np.array([each.number for each in placed], dtype=np.int64)
    columns["branch_returns"] = objects([each.branch.returns for each in placed])
    columns["turn_weights"] = objects([each.branch.weights for each in placed])
    columns["episode_facts"] = objects([None] * len(placed))
    columns[BRANCH_ROWS] = objects([[]] * len(placed))
    return columns


def sequence_shares(placed: Sequence[PlacedRow], branches: DataProto) -> Tensor:
    """Computes which part of its sequence, the turns before it included, each row is: (B,)."""
    lengths = row_sums(branches.batch["response_mask"]).float()
    whole = torch.tensor([float(each.branch.sequence_tokens) for each in placed])
    return lengths / whole.clamp(min=1)


def counted(rows: DataProto, aggregation: str) -> Tensor | None:
    """Returns what each row adds to what means are divided by: (B,) float64; None: to nothing."""
    if aggregation == "token-sum":
        return None
    lengths = row_sums(rows.batch["response_mask"]).double()
    if aggregation == "token-mean":
        return lengths
    return (lengths > 0).double() * rows.batch[SHARE].double()


def mini_batch_of_row(rows: int, plan: BatchPlan) -> Tensor:
    """Numbers the policy's mini-batch of each row, as the ranks will cut them: (rows,) int64."""
    of_rank = rows // plan.ranks
    size = of_rank // plan.actor.mini_batches
    return (torch.arange(rows) % of_rank) // size
