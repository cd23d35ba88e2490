"""The update of policy or critic: mini-batches, micro-batches, and the optimiser's step.

Invariant: the gradient of a mini-batch does not depend on how it is cut into micro-batches, or over
ranks; every mean is a sum divided by the count of the whole mini-batch over all ranks, which is
passed down. What measures is a probe (workers/model/probe.py): it is told of each mini-batch, and
changes nothing.
"""

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from data.protocol import DataProto
from data.seeds import seed_for
from training.config import MicroBatching, UpdatePlan
from training.core_algos import GlobalBatchInfo, seeded_draws
from workers.model.forward_settings import ForwardSettings
from workers.model.loss_fields import FORWARD_FIELDS, LossFields, with_forward_fields
from workers.model.micro_batches import iter_micro_batches, read_rows, scatter_tokens
from workers.model.mini_batches import global_counts, rows_of_updates
from workers.model.packing import ForwardBatch
from workers.model.probe import GroupCounts, MicroBatch, MiniBatch, StepOutcome, TrainedModel
from workers.model.probe_set import UpdateProbes
from workers.model.update_metrics import MetricSums
from workers.ranks.process_groups import rank, sum_over_ranks, world_size
from workers.ranks.sharding import full_tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MicroLoss:
    """Holds what a micro-batch adds to its mini-batch.

    Attributes:
        loss: its sum divided by the counts of the whole mini-batch, times the number of ranks,
            because ranks average their gradients.
        metrics: divided by the same counts, and summed over micro-batches and ranks.
        fields: what it read of the batch, for those who measure.
        outputs: what the model gave, by name: (rows, response_len) each, with their gradient.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    fields: LossFields = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


class UpdateLoop(ABC):
    """Reads and trains a model on one rank.

    Args:
        config: `actor_rollout_ref.actor` or `critic`.
        module: whose forward takes a `ForwardBatch` and returns lists of (sampled tokens,).
        optimizer: None for a model that is only read.
        settings: how the module is run.
        probes: what measures updates.
        trained: the part of the module that trains and is saved; None: all of it.

    Attributes:
        name: of the model, which its metrics begin with.
    """

    name: str

    def __init__(
        self,
        config: Any,
        module: nn.Module,
        optimizer: Optimizer | None,
        settings: ForwardSettings | None,
        probes: UpdateProbes | None = None,
        trained: nn.Module | None = None,
    ) -> None:
        self.config = config
        self.module = module
        self.optimizer = optimizer
        self.settings = settings or ForwardSettings()
        self.probes = probes or UpdateProbes()
        self.trained = module if trained is None else trained
        # `add_groups` has begun an update: its metrics, and how many tokens and sequences it has.
        self.group_sums = MetricSums()
        self.group_counts = torch.zeros(2)
        # The step that they are of.
        self.group_step = 1
        # Half of an update's limits, or less, where the device's memory does not hold what was set.
        self.fitting_limits: MicroBatching | None = None
        if optimizer is not None:
            self.probes.loaded(self.trained_model)

    @property
    def trained_model(self) -> TrainedModel:
        """Returns what probes are shown of the model."""
        assert self.optimizer is not None
        return TrainedModel(self.name, self.trained, self.optimizer, self.settings)

    @abstractmethod
    def micro_loss(
        self, micro: DataProto, inputs: ForwardBatch, counts: GlobalBatchInfo
    ) -> MicroLoss:
        """Computes what a micro-batch adds.

        Args:
            micro: rows of a mini-batch. Its meta_info holds `observation_tokens`, of the
                mini-batch, where it has an `observation_mask`.
            inputs: their layout.
            counts: of the whole mini-batch over all ranks, which sums are divided by.
        """

    def micro_forward(
        self, micro: DataProto, inputs: ForwardBatch, *arguments: Any
    ) -> list[Tensor]:
        """Runs the module on a micro-batch; `arguments` are those of its forward behind the layout.

        Returns: what it computes of sampled tokens, each (rows, response_len), zero where none was
            sampled.
        """
        with self.settings.autocast():
            outputs = self.module(inputs, *arguments)
        shape = micro.batch["responses"].shape
        return [scatter_tokens(output, inputs, shape) for output in outputs]

    @torch.no_grad()
    def read(
        self, data: DataProto, by: str, limits: MicroBatching | None, *arguments: Any
    ) -> list[Tensor]:
        """Computes what the module returns of all rows: each (B, response_len) float32, CPU.

        Args:
            by: who asks, for the error where a field is missing.
            limits: those of a micro-batch; None: the update's own.
        """
        self.module.eval()
        data = with_forward_fields(data)
        data.require(*FORWARD_FIELDS, by=by)
        limits = limits or self.config.micro_batching
        row_numbers = []
        outputs = []
        for rows, micro, inputs in iter_micro_batches(data, self.settings, limits):
            row_numbers.append(rows)
            outputs.append(self.micro_forward(micro, inputs, *arguments))
        return [read_rows(row_numbers, values) for values in zip(*outputs, strict=True)]

    def update(self, data: DataProto, plan: UpdatePlan | None) -> dict[str, float]:
        """Makes an optimiser step for each mini-batch, as planned; returns their mean metrics.

        Among them are NAME/grad_norm, NAME/skipped_updates (those with a norm that is not finite),
        and what probes measured.

        Args:
            plan: None: a mini-batch has `ppo_mini_batch_size` rows, or all.
        """
        plan = plan or self.default_plan(len(data))
        step = data.meta_info.get("global_steps", "?")
        sums = MetricSums(self.settings.sequence_ranks)
        first_of_last_epoch = plan.updates - plan.mini_batches
        for number, row_numbers in enumerate(rows_of_updates(data, plan)):
            rows = data.select_idxs(row_numbers)
            rows.meta_info["mini_batch"] = number
            if "observation_mask" in rows.batch:
                rows.meta_info["observation_tokens"] = self._count_observed(rows)
            rows.meta_info |= self._further_counts(rows)
            mini = MiniBatch(
                counts=self._count(rows),
                rows=rows,
                number=number,
                updates=plan.updates,
                in_last_epoch=number >= first_of_last_epoch,
            )
            sums = self._add_mini_batch(mini, rows, sums)
            self._add_further_rows(sums, rows.meta_info, mini)
            self._show_gradient(mini, rows.meta_info)
            self._step(
                sums,
                has_tokens=self._has_something(mini.counts, rows),
                weight=mini.weight,
                where=f"step {step}, mini-batch {number + 1} of {plan.updates}",
            )
        self._divide_by_what_was_run(sums, plan.updates)
        metrics = sums.read()
        return metrics | self.probes.take(self.settings.sequence_ranks, metrics)

    def add_groups(self, data: DataProto) -> None:
        """Adds the gradient of some groups of a step's one update, which `finish_update` makes.

        It is a sum, not yet divided by the counts, which only all groups together have.
        """
        counts = self._count(data)
        mini = MiniBatch(counts=counts_of_groups(tokens=1, sequences=1.0))
        self.module.train()
        if not self.group_counts.any():
            self._begin(mini)
            self.group_sums = MetricSums(self.settings.sequence_ranks)
            self.group_step = int(data.meta_info.get("global_steps", 1))
        added = [counts["batch_num_tokens"] or 0, counts["global_batch_size"] or 0]
        self.group_counts = self.group_counts + torch.tensor(added)
        limits = self.fitting_limits or self.config.micro_batching
        self._backward(data, mini, self.group_sums, limits)

    def finish_update(self) -> dict[str, float]:
        """Makes the step of the gradients that `add_groups` added up; returns its metrics."""
        tokens, sequences = self.group_counts.clamp(min=1).tolist()
        loss_divisor = sequences
        if self.config.aggregation == "token-mean":
            loss_divisor = tokens
        elif self.config.aggregation == "token-sum":
            loss_divisor = 1
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(loss_divisor)
        others = {f"{self.name}/pg_loss": loss_divisor, f"{self.name}/kl_loss": loss_divisor}
        self.group_sums.divide(tokens, others)
        self.probes.divide(GroupCounts(tokens=tokens, loss=loss_divisor))
        counts = counts_of_groups(tokens=int(tokens), sequences=sequences)
        mini = MiniBatch(counts=counts)
        self._add_further_rows(self.group_sums, {"global_steps": self.group_step}, mini)
        self._show_gradient(mini, {})
        self._step(
            self.group_sums,
            has_tokens=bool(self.group_counts.any()),
            weight=1.0,
            where="an update of finished groups",
        )
        self.group_counts = torch.zeros(2)
        metrics = self.group_sums.read()
        return metrics | self.probes.take(self.settings.sequence_ranks, metrics)

    def default_plan(self, rows: int) -> UpdatePlan:
        """Plans an update by the settings alone."""
        return UpdatePlan.of_rows(
            rows,
            self.config.ppo_mini_batch_size or rows,
            epochs=self.config.ppo_epochs or 1,
            shuffle=self.config.shuffle,
        )

    def _count(self, rows: DataProto) -> GlobalBatchInfo:
        """Counts the tokens and sequences of rows over all ranks."""
        shares = rows.batch.get("episode_share", None)
        return global_counts(rows.batch["response_mask"], self.settings.sequence_ranks, shares)

    def _count_observed(self, rows: DataProto) -> int:
        """Counts the tokens of observations over all ranks."""
        observed = sum_over_ranks(rows.batch["observation_mask"].sum())
        return int(observed) // self.settings.sequence_ranks

    def _further_counts(self, rows: DataProto) -> dict[str, Any]:
        """Counts what else losses divide by, in a mini-batch: entries of its meta_info."""
        return {}

    def _has_something(self, counts: GlobalBatchInfo, rows: DataProto) -> bool:
        """Checks whether a mini-batch has anything to learn from, on any rank."""
        return bool(counts["batch_num_tokens"])

    def _begin(self, mini: MiniBatch) -> None:
        """Begins a mini-batch, without any gradient."""
        assert self.optimizer is not None
        self.module.train()
        self.optimizer.zero_grad(set_to_none=True)
        self.probes.begin(self.trained_model, mini)

    def _add_mini_batch(self, mini: MiniBatch, rows: DataProto, before: MetricSums) -> MetricSums:
        """Computes a mini-batch's gradient; returns the sums before with its metrics.

        Where a single rank's device is out of memory it begins anew, with half the limits for the
        rest of the run. Several ranks cannot: one that has run out of memory leaves the others in
        the midst of a collective.
        """
        while True:
            sums = before.copy()
            limits = self.fitting_limits or self.config.micro_batching
            self._begin(mini)
            try:
                self._backward(rows, mini, sums, limits)
                sums.mini_batches += 1
                return sums
            except torch.OutOfMemoryError as error:
                self.fitting_limits = limits.halved(self._longest_row(rows))
                if world_size() > 1 or self.fitting_limits == limits:
                    raise
                cause = str(error).splitlines()[0]
            # Here the error is gone, and with it what its traceback held.
            torch.cuda.empty_cache()
            logger.warning(
                "an update ran out of the device's memory (%s): its micro-batches have at most %s "
                "for the rest of the run, %s before; set the ppo_..._per_gpu key of that name, and "
                "the next run need not find out",
                cause,
                self.fitting_limits,
                limits,
            )

    @property
    def learns_beside(self) -> bool:
        """Returns whether every mini-batch has further rows to learn from."""
        return False

    def _add_further_rows(self, sums: MetricSums, info: dict[str, Any], mini: MiniBatch) -> None:
        """Adds the gradient of rows beside the mini-batch's; here there are none.

        Args:
            info: the mini-batch's meta_info.
        """
        assert not self.learns_beside

    def _divide_by_what_was_run(self, sums: MetricSums, planned: int) -> None:
        """Makes means over the mini-batches and steps that were run, where others were planned.

        An edit may end the loop early, as where the KL has grown too large, or make it longer.
        """
        if sums.mini_batches == sums.steps == planned:
            return
        others = {
            f"{self.name}/grad_norm": max(sums.steps, 1) / planned,
            # A count.
            f"{self.name}/skipped_updates": 1.0,
        }
        sums.divide(max(sums.mini_batches, 1) / planned, others)

    def _show_gradient(self, mini: MiniBatch, info: dict[str, Any]) -> None:
        """Shows probes the whole gradient of a mini-batch, whose meta_info is `info`."""

        def loss_of(micro: DataProto, inputs: ForwardBatch) -> Tensor:
            return self.micro_loss(micro, inputs, mini.counts).loss

        with seeded_draws(self._seed_of_draws(info, 0)):
            self.probes.before_step(self.trained_model, mini, loss_of)

    def _longest_row(self, mini: DataProto) -> int:
        """Counts the tokens of the longest row, as it is laid out."""
        mask = mini.batch["attention_mask"]
        if not self.settings.strip_padding:
            return mask.shape[1]
        return int(mask.sum(dim=1).max())

    def _backward(
        self, data: DataProto, mini: MiniBatch, sums: MetricSums, limits: MicroBatching
    ) -> None:
        """Adds the gradients of rows of a mini-batch to those that are there, metrics to `sums`."""
        micro_batches = iter_micro_batches(data, self.settings, limits)
        for number, (places, micro, inputs) in enumerate(micro_batches):
            with seeded_draws(self._seed_of_draws(data.meta_info, number)):
                result = self.micro_loss(micro, inputs, mini.counts)
            seen = MicroBatch(rows=micro, places=places, layout=inputs)
            self.probes.before_backward(seen, result.fields, result.outputs, result.loss)
            result.loss.backward()
            sums.add(result.metrics, mini.weight)

    def _seed_of_draws(self, info: dict[str, Any], micro_batch: int) -> int:
        """Derives the seed of what the loss of a micro-batch draws, by its mini-batch's meta_info.

        The ranks that share a sequence draw alike, as they compute one loss.
        """
        group_of_ranks = rank() // self.settings.sequence_ranks
        # Numbers below 0, as prompt groups have those from 0 on.
        return seed_for(
            info.get("seed", 0),
            info.get("global_steps", 0),
            -1 - group_of_ranks,
            sample=info.get("mini_batch", 0),
            turn=micro_batch,
        )

    def _step(self, sums: MetricSums, *, has_tokens: bool, weight: float, where: str) -> None:
        """Makes an optimiser step, if the gradient is finite and there is a token to learn from."""
        assert self.optimizer is not None
        norm = clip_grad_norm(self.module, self.config.grad_clip)
        finite = torch.isfinite(norm)
        outcome: StepOutcome = "nothing_to_learn"
        if not finite:
            warn_not_finite(norm, sums, f"{where} of the {self.name}")
            outcome = "not_finite"
        # With nothing to learn from, momentum alone would move the weights.
        elif has_tokens or self.learns_beside:
            self.optimizer.step()
            outcome = "made"
        self.probes.after_step(self.trained_model, outcome)
        # Every rank has the same norm.
        share = sums.sequence_ranks / world_size()
        prefix = self.name
        sums.add({f"{prefix}/grad_norm": norm}, weight * share)
        sums.add({f"{prefix}/skipped_updates": ~finite}, share)
        sums.steps += 1
        # Nothing reads them until the next update; what generates meanwhile may have their memory.
        self.optimizer.zero_grad(set_to_none=True)


def counts_of_groups(*, tokens: int, sequences: float) -> GlobalBatchInfo:
    """Makes the counts that losses of groups divide by; of ones the losses are sums."""
    return GlobalBatchInfo(
        dp_size=world_size(),
        batch_num_tokens=tokens,
        global_batch_size=sequences,
        loss_scale_factor=None,
    )


def clip_grad_norm(module: nn.Module, max_norm: float) -> Tensor:
    """Clips the gradient; returns its norm before, on the CPU, the same on every rank."""
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
    return full_tensor(norm.detach()).cpu()


def warn_not_finite(norm: Tensor, sums: MetricSums, where: str) -> None:
    """Logs, on the first rank, whose loss made the gradient's norm not finite; a collective."""
    is_culprit = torch.zeros(world_size())
    is_culprit[rank()] = not sums.all_finite()
    ranks = sum_over_ranks(is_culprit).nonzero().flatten().tolist()
    if rank() == 0:
        logger.warning(
            "%s: its gradient has norm %s, from the loss of ranks %s; this update is skipped",
            where,
            norm.item(),
            ranks or "none: it is the backward pass",
        )
