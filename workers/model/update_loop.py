"""The update of policy or critic: mini-batches, micro-batches, and the optimiser's step.

Invariant: the gradient of a mini-batch does not depend on how it is cut into micro-batches, or over
ranks; every mean is a sum divided by the count of the whole mini-batch over all ranks, which is
passed down.
"""

import logging
from abc import ABC, abstractmethod
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from data.protocol import DataProto
from data.seeds import seed_for
from features.records.gradient_shares import gradient_shares
from features.records.token_record import ROW_NUMBER, TokenRecorder
from training.config import MicroBatching, UpdatePlan
from training.core_algos import GlobalBatchInfo, seeded_draws
from workers.model.forward_settings import ForwardSettings
from workers.model.gradient_alignment import read_alignment
from workers.model.gradient_sum import watched_sum
from workers.model.loss_fields import FORWARD_FIELDS
from workers.model.micro_batches import iter_micro_batches, read_rows, scatter_tokens
from workers.model.mini_batches import global_counts, rows_of_updates
from workers.model.packing import ForwardBatch
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
        maxima: metrics of which the largest counts.
        tokens: what is recorded of each token, (rows, response_len) by name, `log_prob` with its
            gradient among them; empty where nothing is.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    maxima: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, Tensor] = field(default_factory=dict)


class UpdateLoop(ABC):
    """Reads and trains a model on one rank.

    Args:
        config: `actor_rollout_ref.actor` or `critic`.
        module: whose forward takes a `ForwardBatch` and returns lists of (sampled tokens,).
        optimizer: None for a model that is only read.
        settings: how the module is run.
    """

    def __init__(
        self,
        config: Any,
        module: nn.Module,
        optimizer: Optimizer | None,
        settings: ForwardSettings | None,
    ) -> None:
        self.config = config
        self.module = module
        self.optimizer = optimizer
        self.settings = settings or ForwardSettings()
        # Of an update that `add_groups` has begun: metrics, and how many tokens and sequences.
        self.group_sums = MetricSums()
        self.group_counts = torch.zeros(2)
        # What updates make of each token, where that is recorded, and of each row's gradient.
        self.recorder: TokenRecorder | None = None
        self.records_gradients = False
        # Half of an update's limits, or less, where the device's memory does not hold what was set.
        self.fitting_limits: MicroBatching | None = None

    @abstractmethod
    def micro_loss(
        self, micro: DataProto, inputs: ForwardBatch, counts: GlobalBatchInfo
    ) -> MicroLoss:
        """Computes what a micro-batch adds.

        Args:
            micro: rows of a mini-batch. Its meta_info holds `updates_to_come`, the number of
                updates of a step in the first of them, and else None; and `observation_tokens`, of
                the mini-batch, where it has an `observation_mask`.
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
        data.require(*FORWARD_FIELDS, by=by)
        limits = limits or self.config.micro_batching
        row_numbers = []
        outputs = []
        for rows, micro, inputs in iter_micro_batches(data, self.settings, limits):
            row_numbers.append(rows)
            outputs.append(self.micro_forward(micro, inputs, *arguments))
        return [read_rows(row_numbers, values) for values in zip(*outputs, strict=True)]

    def update(self, data: DataProto, plan: UpdatePlan | None, prefix: str) -> dict[str, float]:
        """Makes an optimiser step for each mini-batch, as planned; returns their mean metrics.

        Args:
            plan: None: a mini-batch has `ppo_mini_batch_size` rows, or all.
            prefix: of the metrics `grad_norm` and `skipped_updates` (those with a norm that is not
                finite).
        """
        plan = plan or self.default_plan(len(data))
        weight = 1 / plan.updates
        step = data.meta_info.get("global_steps", "?")
        sums = MetricSums(self.settings.sequence_ranks)
        if self.recorder is not None:
            self.recorder.clear()
        first_of_last_epoch = plan.updates - plan.mini_batches
        for number, rows in enumerate(rows_of_updates(data, plan)):
            mini = data.select_idxs(rows)
            mini.meta_info["updates_to_come"] = plan.updates if number == 0 else None
            mini.meta_info["mini_batch"] = number
            mini.meta_info["is_recorded"] = number >= first_of_last_epoch
            if "observation_mask" in mini.batch:
                mini.meta_info["observation_tokens"] = self._count_observed(mini)
            counts = self._count(mini)
            sums = self._add_mini_batch(mini, counts, sums, weight, prefix)
            if self.records_gradients:
                self._record_gradients(mini, counts)
            self._step(
                sums,
                has_tokens=bool(counts["batch_num_tokens"]),
                prefix=prefix,
                weight=weight,
                where=f"step {step}, mini-batch {number + 1} of {plan.updates}",
            )
        return read_alignment(sums.read())

    def add_groups(self, data: DataProto) -> None:
        """Adds the gradient of some groups of a step's one update, which `finish_update` makes.

        It is a sum, not yet divided by the counts, which only all groups together have.
        """
        self.module.train()
        if not self.group_counts.any():
            self._begin_record(data)
            self._begin()
            self.group_sums = MetricSums(self.settings.sequence_ranks)
            self._add_kept_gradients(self.group_sums, "actor")
        counts = self._count(data)
        added = [counts["batch_num_tokens"] or 0, counts["global_batch_size"] or 0]
        self.group_counts = self.group_counts + torch.tensor(added)
        undivided = GlobalBatchInfo(
            dp_size=counts["dp_size"],
            batch_num_tokens=1,
            global_batch_size=1.0,
            loss_scale_factor=counts["loss_scale_factor"],
        )
        rows = replace(data, meta_info=data.meta_info | {"updates_to_come": 1})
        limits = self.fitting_limits or self.config.micro_batching
        # Only a policy learns from groups that have ended.
        self._backward(rows, undivided, self.group_sums, weight=1.0, limits=limits, prefix="actor")

    def finish_update(self, prefix: str) -> dict[str, float]:
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
        if self.recorder is not None:
            self.recorder.divide(loss_divisor)
        others = {f"{prefix}/pg_loss": loss_divisor, f"{prefix}/kl_loss": loss_divisor}
        for name in ("loss_tokens", "loss_targets", "kept_gradients"):
            others[f"{prefix}/{name}"] = 1.0
        self.group_sums.divide(tokens, others)
        self._step(
            self.group_sums,
            has_tokens=bool(self.group_counts.any()),
            prefix=prefix,
            weight=1.0,
            where="an update of finished groups",
        )
        self.group_counts = torch.zeros(2)
        return read_alignment(self.group_sums.read())

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

    def _begin(self) -> None:
        assert self.optimizer is not None
        self.module.train()
        self.optimizer.zero_grad(set_to_none=True)

    def _add_kept_gradients(self, sums: MetricSums, prefix: str) -> None:
        """Counts the gradients that are there before a backward pass, a mean over ranks."""
        share = sums.sequence_ranks / world_size()
        sums.add({f"{prefix}/kept_gradients": count_gradients(self.module)}, share)

    def _add_mini_batch(
        self,
        mini: DataProto,
        counts: GlobalBatchInfo,
        before: MetricSums,
        weight: float,
        prefix: str,
    ) -> MetricSums:
        """Computes a mini-batch's gradient; returns the sums before with its metrics.

        Where a single rank's device is out of memory it begins anew, with half the limits for the
        rest of the run. Several ranks cannot: one that has run out of memory leaves the others in
        the midst of a collective.
        """
        while True:
            sums = deepcopy(before)
            limits = self.fitting_limits or self.config.micro_batching
            self._begin_record(mini)
            self._begin()
            self._add_kept_gradients(sums, prefix)
            try:
                self._backward(mini, counts, sums, weight, limits, prefix)
                return sums
            except torch.OutOfMemoryError as error:
                self.fitting_limits = limits.halved(self._longest_row(mini))
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

    def _begin_record(self, mini: DataProto) -> None:
        """Begins to record a mini-batch, once more where it begins anew."""
        if self.recorder is not None:
            info = mini.meta_info
            number = info.get("mini_batch", 0)
            self.recorder.begin(number, keeps_values=info.get("is_recorded", True))

    def _record_gradients(self, mini: DataProto, counts: GlobalBatchInfo) -> None:
        """Adds each row's share of the gradient, which is there, to the record."""
        if self.recorder is None or ROW_NUMBER not in mini.batch:
            return

        def loss_of(micro: DataProto, inputs: ForwardBatch) -> Tensor:
            return self.micro_loss(micro, inputs, counts).loss

        with seeded_draws(self._seed_of_draws(mini, 0)):
            shares = gradient_shares(self.module, mini, self.settings, loss_of)
        self.recorder.add_gradient_shares(mini, shares)

    def _longest_row(self, mini: DataProto) -> int:
        """Counts the tokens of the longest row, as it is laid out."""
        mask = mini.batch["attention_mask"]
        if not self.settings.strip_padding:
            return mask.shape[1]
        return int(mask.sum(dim=1).max())

    def _backward(
        self,
        mini: DataProto,
        counts: GlobalBatchInfo,
        sums: MetricSums,
        weight: float,
        limits: MicroBatching,
        prefix: str,
    ) -> None:
        """Adds the gradients of rows to those that are there, and their metrics to `sums`."""
        micro_batches = iter_micro_batches(mini, self.settings, limits)
        with watched_sum(self.module) as missing:
            for number, (rows, micro, inputs) in enumerate(micro_batches):
                with seeded_draws(self._seed_of_draws(mini, number)):
                    result = self.micro_loss(micro, inputs, counts)
                if self.recorder is not None and result.tokens:
                    self.recorder.see(micro, rows, result.tokens)
                result.loss.backward()
                sums.add(result.metrics, weight)
                sums.add(learnt_from(micro, prefix))
                sums.maximum(result.maxima)
            sums.maximum({f"{prefix}/missing_gradient": missing()})

    def _seed_of_draws(self, mini: DataProto, micro_batch: int) -> int:
        """Derives the seed of what the loss of a micro-batch draws.

        The ranks that share a sequence draw alike, as they compute one loss.
        """
        info = mini.meta_info
        group_of_ranks = rank() // self.settings.sequence_ranks
        # Numbers below 0, as prompt groups have those from 0 on.
        return seed_for(
            info.get("seed", 0),
            info.get("global_steps", 0),
            -1 - group_of_ranks,
            sample=info.get("mini_batch", 0),
            turn=micro_batch,
        )

    def _step(
        self, sums: MetricSums, *, has_tokens: bool, prefix: str, weight: float, where: str
    ) -> None:
        """Makes an optimiser step, if the gradient is finite and there is a token to learn from."""
        assert self.optimizer is not None
        norm = clip_grad_norm(self.module, self.config.grad_clip)
        finite = torch.isfinite(norm)
        if not finite:
            warn_not_finite(norm, sums, f"{where} of the {prefix}")
            if self.recorder is not None:
                self.recorder.skip()
        # With nothing to learn from, momentum alone would move the weights.
        elif has_tokens:
            self.optimizer.step()
        # Every rank has the same norm.
        share = sums.sequence_ranks / world_size()
        sums.add({f"{prefix}/grad_norm": norm}, weight * share)
        sums.add({f"{prefix}/skipped_updates": ~finite}, share)
        # Nothing reads them until the next update; what generates meanwhile may have their memory.
        self.optimizer.zero_grad(set_to_none=True)


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


def count_gradients(module: nn.Module) -> float:
    """Counts the parameters that have a gradient other than zero."""
    gradients = [parameter.grad for parameter in module.parameters()]
    return float(sum(bool(gradient.any()) for gradient in gradients if gradient is not None))


def learnt_from(micro: DataProto, prefix: str) -> dict[str, Tensor]:
    """Counts what a micro-batch's loss is made of, to be compared with the step's batch.

    Returns: PREFIX/loss_tokens, and PREFIX/loss_targets, the sum of their advantages, of a critic
        of their returns.
    """
    mask = micro.batch["response_mask"]
    targets = micro.batch["returns" if prefix == "critic" else "advantages"]
    return {
        f"{prefix}/loss_tokens": mask.sum(),
        f"{prefix}/loss_targets": (targets * mask).sum(),
    }
