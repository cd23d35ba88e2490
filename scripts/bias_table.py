"""Computes the bias table: how far expected gradients are from the policy gradient.

The MDP of scripts/bias_mdp.py is enumerated: every episode, every group of four of them, with their
probabilities. Each group goes through the estimators, corrections and losses of `training`, in
float64, so that the expected gradient is exact, and not an average over samples.

    python scripts/bias_table.py    # scripts/bias_table.csv, which --explain reads, and the two
                                    # short tables of docs/bias.md
"""

from __future__ import annotations

import csv
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import Tensor

from scripts.bias_branches import BIASED_WAYS, BRANCHED, UNBIASED_WAYS, BranchedGroups, Way
from scripts.bias_mdp import EPISODES, GROUPS, WORLD, Groups, Policies, policies_after
from training import core_algos
from training.config.bias import SEQUENCE_REJECTION, TABLE
from training.config.schema.actor import PolicyLossChoice
from training.config.schema.algorithm import RolloutCorrectionConfig
from training.core_algos import (
    ESTIMATOR_NEEDS,
    LOSS_AGG_MODES,
    PolicyLossConfig,
    agg_loss,
    call_adv_estimator,
    correct_as,
)

PAGE = Path(__file__).resolve().parent.parent / "docs/bias.md"
MARKERS = ("<!-- bias-table -->", "<!-- /bias-table -->")
# How many updates old samples are: 0 to 2.
STALE = 3
# The aggregation of a policy loss that weighs the tokens of all sequences alike.
SUM_MODE = "seq-mean-token-sum"
# The modes that are listed: others have the direction of SUM_MODE, and its length times a constant.
MODES = ("token-mean", "seq-mean-token-mean", SUM_MODE)
# Columns of the short tables: the modes, and how many updates old the samples are.
PAGE_MODES = ("token-mean", SUM_MODE)
PAGE_STALE = (0, 2)
CORRECTIONS = {
    "old": RolloutCorrectionConfig(),
    "none": RolloutCorrectionConfig(),
    "token": RolloutCorrectionConfig(rollout_is="token"),
    "sequence": RolloutCorrectionConfig(rollout_is="sequence"),
    "token band": RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold="0.5_2.0"),
    "sequence rejection": SEQUENCE_REJECTION,
}
# Settings that change an estimator.
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo no_std": {"norm_adv_by_std_in_grpo": False},
    "gigpo no_std": {"norm_adv_by_std_in_grpo": False},
    "turn_gae unwhitened": {"whiten": False},
    "turn_return with itself": {"leave_one_out": False},
}
# Their advantages depend on the whole batch, and not on the group alone.
OF_BATCH = ("gae", "turn_gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo", "gpg")
# They give a sequence one loss, whatever the mode of aggregation.
SEQUENCE_LOSSES = ("geo_mean", "sapo")
# They choose tokens of a micro-batch: enumerated for some estimators only, group by group.
CHOOSING = ("clip_cov", "kl_cov")
CHOOSING_WITH = ("gae", "grpo", "rloo")
# A gradient that is shorter has no direction.
NO_GRADIENT = 1e-12
# Those of the algorithm's settings that estimators read.
ALGORITHM = SimpleNamespace(
    gamma=1.0,
    turn_gamma=1.0,
    turn_lam=1.0,
    gigpo_step_weight=1.0,
    distillation_coef=1.0,
    distillation_task=None,
    gdpo_reward_keys=(),
    gdpo_reward_weights=(),
    norm_adv_by_std_in_grpo=True,
)
# Baselines that a trainer keeps or samples: rae's running mean, remax's greedy reward.
RAE_BASELINE = 0.4
REMAX_BASELINE = 0.7


class Combination(NamedTuple):
    """Names a row of the table."""

    estimator: str
    loss: str
    correction: str


# Combination -> `MODE/STALE` -> `COSINE RATIO`.
Table = dict[Combination, dict[str, str]]


class Comparison(NamedTuple):
    """Compares a gradient with the true one: their cosine, and the ratio of its length to that."""

    cosine: float
    ratio: float


@dataclass(frozen=True)
class Case:
    """Holds what a trainer has when it updates: tensors of all groups' rows, (rows, WIDTH)."""

    groups: Groups
    policies: Policies
    correction: str

    @property
    def settings(self) -> RolloutCorrectionConfig:
        """Returns the correction's settings."""
        return CORRECTIONS[self.correction]

    def of_rows(self, per_episode: Tensor) -> Tensor:
        """Repeats the episodes' numbers for the rows of all groups."""
        return per_episode[self.groups.rows]

    @property
    def sampled(self) -> Tensor:
        """Returns which tokens are trained on: all, but in a branch those before it."""
        if isinstance(self.groups, BranchedGroups):
            return self.groups.trained
        return self.of_rows(WORLD.mask)

    def tensors(self) -> dict[str, Tensor]:
        """Makes the batch.

        With `old` the old log-probs are the sampler's, else the updated policy's.
        """
        new = self.of_rows(WORLD.log_probs(self.policies.updated))
        sampled = self.of_rows(WORLD.log_probs(self.policies.sampler))
        if self.correction == "old":
            old = sampled
            old_logits = self.policies.sampler.log_softmax(-1)
        else:
            old = new
            old_logits = self.policies.updated.log_softmax(-1)
        sum_pi_squared = (2 * old_logits).exp().sum(-1)[WORLD.contexts]
        baselines = torch.full((len(self.groups.rows),), REMAX_BASELINE, dtype=torch.float64)
        batch = {
            "token_level_rewards": self.of_rows(WORLD.rewards),
            "response_mask": self.sampled,
            "turn_ids": self.of_rows(WORLD.turn_ids),
            "values": self.of_rows(WORLD.values(self.policies.sampler)),
            "log_probs": new,
            "rollout_log_probs": sampled,
            "old_log_probs": old,
            "ref_log_prob": self.of_rows(WORLD.log_probs(self.policies.teacher)),
            "sum_pi_squared": self.of_rows(sum_pi_squared),
            "reward_baselines": baselines,
        }
        weights, batch["response_mask"], _ = correct_as(
            self.settings, new, sampled, batch["response_mask"]
        )
        if weights is not None:
            batch["rollout_is_weights"] = weights
        return batch

    def loss_mask(self, loss: str, batch: dict[str, Tensor]) -> Tensor:
        """Returns the mask that a loss is given: bypass_mode makes its own correction."""
        if loss == "bypass_mode":
            return self.sampled
        return batch["response_mask"]


def advantages_of(name: str, batch: dict[str, Tensor], groups: Groups) -> Tensor:
    """Runs the estimator, of one batch a group where it looks beyond groups: (rows, WIDTH)."""
    estimator = name.split()[0]
    if estimator not in OF_BATCH:
        return _advantages_of_rows(name, batch, groups, slice(None))
    advantages = []
    for start in range(0, len(groups.rows), groups.size):
        rows = slice(start, start + groups.size)
        advantages.append(_advantages_of_rows(name, batch, groups, rows))
    return torch.cat(advantages)


def _advantages_of_rows(
    name: str, batch: dict[str, Tensor], groups: Groups, rows: slice, **arguments: Any
) -> Tensor:
    """Runs the estimator on a batch of these rows."""
    index = groups.index[rows]
    tensors = {key: tensor[rows] for key, tensor in batch.items()}
    branches: dict[str, Any] = {}
    if isinstance(groups, BranchedGroups):
        branches = {
            "branch_returns": groups.branch_returns[rows],
            "turn_weights": groups.turn_weights[rows],
        }
    advantages, _ = call_adv_estimator(
        name.split()[0],
        **tensors,
        **branches,
        index=index,
        role=np.full(len(index), "policy"),
        anchors=[EPISODES[row].states for row in groups.rows[rows].tolist()],
        state={"policy": RAE_BASELINE},
        non_tensor_batch={},
        config=ALGORITHM,
        gamma=1.0,
        lam=1.0,
        **VARIANTS.get(name, {}),
        **arguments,
    )
    return advantages


def loss_config(correction: RolloutCorrectionConfig) -> PolicyLossConfig:
    """Returns the losses' defaults.

    bypass_mode is the form whose weights correct; its other form is vanilla.
    """
    return PolicyLossConfig(
        policy_loss=PolicyLossChoice(dro_beta=0.1),
        rollout_correction=replace(correction, loss_type="reinforce"),
    )


@dataclass(frozen=True)
class LossInputs:
    """Holds what a policy loss reads, (rows, WIDTH) each."""

    old_log_probs: Tensor
    log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    rollout_is_weights: Tensor | None

    def split(self, size: int) -> Iterator[LossInputs]:
        """Yields the inputs of each group of `size` rows."""
        for start in range(0, len(self.log_probs), size):
            rows = slice(start, start + size)
            weights = self.rollout_is_weights
            yield LossInputs(
                self.old_log_probs[rows],
                self.log_probs[rows],
                self.advantages[rows],
                self.response_mask[rows],
                None if weights is None else weights[rows],
            )

    def gradient(self, loss: str, config: PolicyLossConfig) -> Tensor:
        """Differentiates the sum of the tokens' losses by their log-probs: (rows, WIDTH)."""
        leaf = self.log_probs.clone().requires_grad_()
        value, _ = core_algos.get_policy_loss_fn(loss)(
            self.old_log_probs,
            leaf,
            self.advantages,
            self.response_mask,
            "token-sum",
            config,
            self.rollout_is_weights,
        )
        (gradient,) = torch.autograd.grad(value, leaf)
        return gradient


def token_gradients(loss: str, batch: dict[str, Tensor], advantages: Tensor, case: Case) -> Tensor:
    """Differentiates the sum of the tokens' losses by their log-probs: (rows, WIDTH)."""
    bypass = loss == "bypass_mode"
    config = loss_config(case.settings)
    mask = case.loss_mask(loss, batch)
    inputs = LossInputs(
        old_log_probs=batch["rollout_log_probs" if bypass else "old_log_probs"],
        log_probs=batch["log_probs"],
        advantages=advantages,
        response_mask=mask,
        rollout_is_weights=None if bypass else batch.get("rollout_is_weights"),
    )
    if loss in CHOOSING:
        return _mean_over_draws(loss, inputs, config, case.groups.size)
    gradient = inputs.gradient(loss, config)
    if loss in SEQUENCE_LOSSES:
        # A mean over rows, of all groups: the sum over them is wanted.
        return gradient * mask.any(-1).sum()
    return gradient


class _Rotation:
    """Stands in for torch.randperm: the numbers in order, from `first` on; keeps their count."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.count: int | None = None

    def __call__(self, count: int, **_: Any) -> Tensor:
        if self.count is None:
            self.count = count
        return torch.arange(count).roll(-self.first)


def _mean_over_draws(
    loss: str, inputs: LossInputs, config: PolicyLossConfig, group_size: int
) -> Tensor:
    """Averages over every draw of a loss that draws a token of its micro-batch, which is a group.

    Returns:
        (rows, WIDTH), the mean gradient.
    """
    gradients = []
    for group in inputs.split(group_size):
        draws: list[Tensor] = []
        # How many tokens there are to draw from is known after the first draw.
        count = 1
        while len(draws) < count:
            rotation = _Rotation(first=len(draws))
            with mock.patch.object(torch, "randperm", rotation):
                draws.append(group.gradient(loss, config))
            if len(draws) == 1 and rotation.count is not None:
                count = rotation.count
        gradients.append(torch.stack(draws).mean(0))
    return torch.cat(gradients)


def token_weights(groups: Groups, mask: Tensor, mode: str) -> Tensor:
    """Asks `agg_loss` for what it multiplies each token with, group by group: (rows, WIDTH)."""
    leaf = torch.zeros(mask.shape, dtype=torch.float64, requires_grad=True)
    sums = []
    for losses, inside in zip(leaf.split(groups.size), mask.split(groups.size), strict=True):
        sums.append(agg_loss(losses, inside, mode))  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(torch.stack(sums).sum(), leaf)
    return gradient


def in_logits(per_token: Tensor, case: Case) -> Tensor:
    """Turns gradients by the tokens' log-probs into the expected one by the updated logits.

    Args:
        per_token: (rows, WIDTH), of the rows of all groups.
    Returns:
        (CONTEXTS, TOKENS).
    """
    groups = case.groups
    probabilities = groups.probabilities.repeat_interleave(groups.size)[:, None]
    of_episode = torch.zeros(WORLD.mask.shape, dtype=torch.float64)
    of_episode.index_add_(0, groups.rows, per_token * probabilities)
    leaf = case.policies.updated.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((WORLD.log_probs(leaf) * of_episode).sum(), leaf)
    return gradient


def true_gradient(estimator: str, policies: Policies) -> Tensor:
    """Returns the gradient of the expected reward, (CONTEXTS, TOKENS).

    Of distillation it is that of the negative reverse KL of whole episodes.
    """
    if estimator != "on_policy_distillation":
        return WORLD.expected(policies.updated)
    apart = WORLD.log_probs(policies.teacher) - WORLD.log_probs(policies.updated)
    return WORLD.expected(policies.updated, apart.sum(-1, keepdim=True))


def weight_mode(loss: str, mode: str) -> str:
    """Names the aggregation that weighs the tokens of a loss."""
    return SUM_MODE if loss in SEQUENCE_LOSSES else mode


def expected_gradient(estimator: str, loss: str, mode: str, case: Case) -> Tensor:
    """Computes the direction of an update, the expected negative gradient: (CONTEXTS, TOKENS)."""
    batch = case.tensors()
    advantages = advantages_of(estimator, batch, case.groups)
    mask = case.loss_mask(loss, batch)
    weights = token_weights(case.groups, mask, weight_mode(loss, mode))
    return -in_logits(token_gradients(loss, batch, advantages, case) * weights, case)


def compare(gradient: Tensor, true: Tensor) -> Comparison:
    """Compares a gradient with the true one; of one that vanishes both numbers are 0."""
    if float(gradient.norm()) < NO_GRADIENT:
        return Comparison(0.0, 0.0)
    cosine = (gradient * true).sum() / gradient.norm() / true.norm()
    return Comparison(float(cosine), float(gradient.norm() / true.norm()))


def estimators() -> list[str]:
    """Lists the estimators, each once, with their variants behind them."""
    names = []
    for estimator in ESTIMATOR_NEEDS:
        if not estimator.endswith("_vectorized"):
            names.append(estimator)
            names += [variant for variant in VARIANTS if variant.split()[0] == estimator]
    return names


@dataclass(frozen=True)
class Cell:
    """Holds an entry of the table, of samples that are `stale` updates old."""

    combination: Combination
    mode: str
    comparison: Comparison


def cells(correction: str, stale: int) -> Iterator[Cell]:
    """Yields the entries of one form of correction."""
    in_groups = [name for name in estimators() if name not in BRANCHED]
    yield from cells_of(in_groups, Case(GROUPS, policies_after(stale), correction), stale)
    for estimator, branched in BRANCHED.items():
        yield from cells_of([estimator], Case(branched(), policies_after(stale), correction), stale)


def cells_of(names: list[str], case: Case, stale: int) -> Iterator[Cell]:
    """Yields the entries of some estimators, which see the same groups."""
    batch = case.tensors()
    correction = case.correction
    weights = {mode: token_weights(case.groups, batch["response_mask"], mode) for mode in MODES}
    bypass_weights = {mode: token_weights(case.groups, case.sampled, mode) for mode in MODES}
    for estimator in names:
        advantages = advantages_of(estimator, batch, case.groups)
        true = true_gradient(estimator, case.policies)
        for loss in core_algos.POLICY_LOSS_REGISTRY:
            if loss in CHOOSING and (correction != "old" or estimator not in CHOOSING_WITH):
                continue
            gradients = token_gradients(loss, batch, advantages, case)
            loss_weights = bypass_weights if loss == "bypass_mode" else weights
            for mode in MODES:
                weighted = gradients * loss_weights[weight_mode(loss, mode)]
                comparison = compare(-in_logits(weighted, case), true)
                yield Cell(Combination(estimator, loss, correction), mode, comparison)


def compute() -> Table:
    """Computes the whole table."""
    table: Table = {}
    for correction, stale in itertools.product(CORRECTIONS, range(STALE)):
        for cell in cells(correction, stale):
            row = table.setdefault(cell.combination, {})
            row[f"{cell.mode}/{stale}"] = as_text(cell.comparison)
        print(f"{correction}, {stale} updates old: {len(table)} rows", flush=True)
    return table


def branch_comparison(way: Way) -> Comparison:
    """Compares what a way to branch expects on fresh samples with the policy gradient.

    The loss is vanilla, and sums each main episode's tokens with all that is trained on beside it.
    """
    case = Case(way.rows(), policies_after(0), "old")
    batch = case.tensors()
    arguments = {"divide_by_std": True} if way.divide_by_std else {}
    advantages = _advantages_of_rows(way.estimator, batch, case.groups, slice(None), **arguments)
    gradients = token_gradients("vanilla", batch, advantages, case)
    return compare(-in_logits(gradients, case), true_gradient(way.estimator, case.policies))


def as_text(comparison: Comparison) -> str:
    """Writes a comparison as the table has it: "0.752 0.95"."""
    return f"{comparison.cosine:.3f} {comparison.ratio:.2f}"


def write(table: Table) -> None:
    """Writes the CSV."""
    columns = [f"{mode}/{stale}" for mode in MODES for stale in range(STALE)]
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*Combination._fields, *columns])
        for combination, row in sorted(table.items()):
            writer.writerow([*combination, *(row[column] for column in columns)])


def page_tables(table: Table) -> str:
    """Draws the short tables of the docs, one below the other."""
    vanilla = [key for key in table if key.loss == "vanilla" and key.correction == "old"]
    grpo = [key for key in table if key.estimator == "grpo" and key.correction == "old"]
    rloo_gpg = [key for key in table if key.estimator == "rloo" and key.loss == "gpg"]
    tables = [
        _page_table("estimator, with vanilla", {key.estimator: table[key] for key in vanilla}),
        _page_table("loss, with grpo", {key.loss: table[key] for key in grpo}),
        _page_table(
            "correction, with rloo and gpg", {key.correction: table[key] for key in rloo_gpg}
        ),
        branch_table(),
    ]
    return "\n\n".join(tables)


def _page_table(title: str, rows: dict[str, dict[str, str]]) -> str:
    """Draws one table: a row for each name."""
    columns = [(mode, stale) for mode in PAGE_MODES for stale in PAGE_STALE]
    heads = [f"{mode}, {stale} old" for mode, stale in columns]
    lines = [f"| {title} | {' | '.join(heads)} |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        cells_of_row = [row[f"{mode}/{stale}"] for mode, stale in columns]
        lines.append(f"| {name} | {' | '.join(cells_of_row)} |")
    return "\n".join(lines)


def branch_table() -> str:
    """Draws the table of what is sampled and trained on beside the episode."""
    lines = ["| branches, with vanilla, fresh | cosine | length |", "|---|---|---|"]
    for name, way in (UNBIASED_WAYS | BIASED_WAYS).items():
        cosine, ratio = branch_comparison(way)
        lines.append(f"| {name} | {cosine:.4f} | {ratio:.4f} |")
    return "\n".join(lines)


def main() -> None:
    """Computes, writes the file, and puts the short tables between their marks in the docs."""
    table = compute()
    write(table)
    begin, end = MARKERS
    text = f"{begin}\n{page_tables(table)}\n{end}"
    page = re.sub(f"{begin}.*?{end}", lambda _: text, PAGE.read_text(), flags=re.DOTALL)
    PAGE.write_text(page)


if __name__ == "__main__":
    assert set(MODES) < set(LOSS_AGG_MODES)
    main()
