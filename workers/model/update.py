"""What actor and critic share: an optimiser, its schedule, and the loops over mini- and micro-batches.

Invariant: the gradient of a mini-batch does not depend on how it is cut into micro-batches, or over ranks; every mean
is a sum divided by the count of the whole mini-batch over all ranks, which is passed down.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from data.containers import seed_for
from data.protocol import DataProto
from data.texts import say
from training.batch import torch_functional as schedules
from training.batch.batching import shuffled_groups
from training.config import MicroBatching, OptimConfig, UpdatePlan
from training.core_algos import GlobalBatchInfo
from workers.model.forward import (
    FORWARD_FIELDS,
    ForwardBatch,
    ForwardSettings,
    iter_micro_batches,
    read_rows,
    scatter_tokens,
)
from workers.ranks.distributed import full_tensor, max_over_ranks, rank, sum_over_ranks, world_size

logger = logging.getLogger(__name__)


class MicroLoss(NamedTuple):
    """Holds what a micro-batch adds to its mini-batch.

    `loss` is its sum divided by the counts of the whole mini-batch, times the number of ranks, because ranks average
    their gradients. `metrics` are divided by the same counts, and summed over micro-batches and ranks; of `maxima` the
    largest counts.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    maxima: dict[str, Tensor]


def build_optimizer(module: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """Makes AdamW in its fused form: one pass over memory on CPU and CUDA alike."""
    betas, decay = tuple(optim.betas), optim.weight_decay
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=optim.lr, betas=betas, weight_decay=decay, fused=True)


def build_scheduler(optimizer: Optimizer, optim: OptimConfig, total_steps: int) -> LambdaLR:
    """Makes the schedule over `total_steps` training steps; it advances once a step, not with each optimiser step.

    Warm-up is `lr_warmup_steps`, or a ratio of all steps where that is negative. wsd (arXiv:2404.06395) holds the rate
    for nine tenths of the steps after the warm-up, and then decays by a cosine.
    """
    warmup = (
        optim.lr_warmup_steps
        if optim.lr_warmup_steps >= 0
        else int(optim.lr_warmup_steps_ratio * total_steps)
    )
    shape = optimizer, warmup, total_steps, optim.min_lr_ratio
    if optim.scheduler == "constant":
        return schedules.get_constant_schedule_with_warmup(optimizer, warmup)
    if optim.scheduler == "cosine":
        return schedules.get_cosine_schedule_with_warmup(*shape, optim.num_cycles)
    return schedules.get_wsd_schedule_with_warmup(*shape)


class Trained(ABC):
    """Is a model that a rank reads and trains, the policy or the critic; `config` is its section of the settings."""

    def __init__(
        self,
        config: Any,
        module: nn.Module,
        optimizer: Optimizer | None,
        settings: ForwardSettings | None,
    ) -> None:
        self.config, self.module, self.optimizer = config, module, optimizer
        self.settings = settings or ForwardSettings()
        # Of an update that `add_groups` has begun: metrics, and how many tokens and sequences.
        self.sums, self.counted = MetricSums(), torch.zeros(2)
        # What fits into the device's memory of an update's limits, where less does than was set.
        self.fitting: MicroBatching | None = None

    def micro_forward(self, micro: DataProto, inputs: ForwardBatch, *how: Any) -> list[Tensor]:
        """Computes what the module says of sampled tokens: each (rows, response_len), zero where none was sampled."""
        with self.settings.autocast():
            kinds = self.module(inputs, *how)
        return [scatter_tokens(kind, inputs, micro.batch["responses"].shape) for kind in kinds]

    @abstractmethod
    def micro_loss(
        self, micro: DataProto, inputs: ForwardBatch, counts: GlobalBatchInfo
    ) -> MicroLoss:
        """Computes what a micro-batch adds, given the counts of its mini-batch."""

    @torch.no_grad()
    def read(
        self, data: DataProto, by: str, limits: MicroBatching | None, *how: Any
    ) -> list[Tensor]:
        """Reads what the module says of all rows: each (B, response_len) float32, on the CPU."""
        self.module.eval()
        data.require(*FORWARD_FIELDS, by=by)
        batches = iter_micro_batches(data, self.settings, limits or self.config.micro_batching)
        read = [(rows, self.micro_forward(micro, inputs, *how)) for rows, micro, inputs in batches]
        return [
            read_rows([(rows, own[kind]) for rows, own in read]) for kind in range(len(read[0][1]))
        ]

    def update(self, data: DataProto, plan: UpdatePlan | None, prefix: str) -> dict[str, float]:
        """Passes over the rows as planned, with one optimiser step for each mini-batch; returns their mean metrics.

        Args:
            plan: None: a mini-batch has `ppo_mini_batch_size` rows, or all.
            prefix: of the metrics `grad_norm` and `skipped_updates` (those with a norm that is not finite).
        """
        plan, ranks = plan or self.plan(len(data)), self.settings.sequence_ranks
        sums = MetricSums(ranks)
        for number, rows in enumerate(rows_of_updates(data, plan)):
            mini, weight = data.select_idxs(rows), 1 / plan.updates
            mini.meta_info["updates_to_come"] = plan.updates if number == 0 else None
            counts = global_counts(
                mini.batch["response_mask"], ranks, mini.batch.get("episode_share", None)
            )
            if "observation_mask" in mini.batch:
                observed = sum_over_ranks(mini.batch["observation_mask"].sum())
                mini.meta_info["observation_tokens"] = int(observed) // ranks
            sums = self._add_up(mini, counts, sums, weight)
            where = f"step {data.meta_info.get('global_steps', '?')}, mini-batch {number + 1} of {plan.updates}"
            self._step(sums, bool(counts["batch_num_tokens"]), prefix, weight, where)
        return sums.read()

    def add_groups(self, data: DataProto) -> None:
        """Adds the gradient of some groups of the rows of a step's one update; `finish_update` makes the update.

        It is a sum, not yet divided by the counts, which only all groups together have.
        """
        self.module.train()
        if not self.counted.any():
            self._begin()
            self.sums = MetricSums(self.settings.sequence_ranks)
        own = global_counts(
            data.batch["response_mask"], self.sums.sequence_ranks, data.batch.get("episode_share")
        )
        self.counted = self.counted + torch.tensor(
            [own["batch_num_tokens"] or 0, own["global_batch_size"] or 0]
        )
        undivided = GlobalBatchInfo(**(own | {"batch_num_tokens": 1, "global_batch_size": 1.0}))
        rows = replace(data, meta_info=data.meta_info | {"updates_to_come": 1})
        self._backward(rows, undivided, self.sums, 1.0, self.fitting or self.config.micro_batching)

    def finish_update(self, prefix: str) -> dict[str, float]:
        """Makes the step of the gradients that `add_groups` added up; returns the metrics that `update` returns."""
        tokens, sequences = self.counted.clamp(min=1).tolist()
        of_loss = {"token-mean": tokens, "token-sum": 1}.get(self.config.loss_agg_mode, sequences)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(of_loss)
        self.sums.divide(tokens, dict.fromkeys((f"{prefix}/pg_loss", f"{prefix}/kl_loss"), of_loss))
        self._step(self.sums, bool(self.counted.any()), prefix, 1.0, "an update of finished groups")
        self.counted = torch.zeros(2)
        return self.sums.read()

    def _begin(self) -> None:
        assert self.optimizer is not None
        self.module.train()
        self.optimizer.zero_grad(set_to_none=True)

    def _step(
        self, sums: "MetricSums", learns: bool, prefix: str, weight: float, where: str
    ) -> None:
        """Makes an optimiser step of the gradient that is there, if there are tokens to learn from and it is finite."""
        assert self.optimizer is not None
        norm, share = (
            clip_grad_norm(self.module, self.config.grad_clip),
            sums.sequence_ranks / world_size(),
        )
        if not torch.isfinite(norm):
            say_not_finite(norm, sums, f"{where} of the {prefix}")
        # With nothing to learn from, momentum alone would move the weights.
        elif learns:
            self.optimizer.step()
        # Every rank has the same norm.
        sums.add({f"{prefix}/grad_norm": norm}, weight * share)
        sums.add({f"{prefix}/skipped_updates": ~torch.isfinite(norm)}, share)
        # Nothing reads them until the next update; what generates meanwhile may have their memory.
        self.optimizer.zero_grad(set_to_none=True)

    def _add_up(
        self, mini: DataProto, counts: GlobalBatchInfo, before: "MetricSums", weight: float
    ) -> "MetricSums":
        """Computes a mini-batch's gradient; returns the sums before with its metrics.

        Where a single rank's device is out of memory it begins anew, with half the limits for the rest of the run.
        Several ranks cannot: one that has run out of memory leaves the others in the midst of a collective.
        """
        while True:
            sums, limits = deepcopy(before), self.fitting or self.config.micro_batching
            self._begin()
            try:
                self._backward(mini, counts, sums, weight, limits)
                return sums
            except torch.OutOfMemoryError as error:
                mask = mini.batch["attention_mask"]
                longest = (
                    int(mask.sum(dim=1).max()) if self.settings.strip_padding else mask.shape[1]
                )
                self.fitting = limits.halved(longest)
                if world_size() > 1 or self.fitting == limits:
                    raise
                said = str(error).splitlines()[0]
            # Here the error is gone, and with it what its traceback held.
            torch.cuda.empty_cache()
            logger.warning(say("halved", said=said, fits=self.fitting, before=limits))

    def _backward(
        self,
        mini: DataProto,
        counts: GlobalBatchInfo,
        sums: "MetricSums",
        weight: float,
        limits: MicroBatching,
    ) -> None:
        """Adds the gradients and metrics of rows to those that are there."""
        for _, micro, inputs in iter_micro_batches(mini, self.settings, limits):
            loss, metrics, maxima = self.micro_loss(micro, inputs, counts)
            loss.backward()
            sums.add(metrics, weight)
            sums.maximum(maxima)

    def plan(self, rows: int) -> UpdatePlan:
        """Plans an update by the settings alone."""
        config = self.config
        return UpdatePlan.of_rows(
            rows, config.ppo_mini_batch_size or rows, config.ppo_epochs or 1, config.shuffle
        )


def rows_of_updates(data: DataProto, plan: UpdatePlan) -> list[Tensor]:
    """Lists the row numbers of every mini-batch, epoch by epoch; shuffling keeps a group's rows together.

    meta_info `seed` and `global_steps` seed the shuffling.
    """
    if len(data) % plan.mini_batches:
        raise ValueError(say("rows_not_arranged", rows=len(data), parts=plan.mini_batches))
    size = len(data) // plan.mini_batches
    if not plan.shuffle:
        return [*torch.arange(len(data)).split(size)] * plan.epochs
    seed = seed_for(data.meta_info["seed"], data.meta_info["global_steps"], 0)
    generator, uids = torch.Generator().manual_seed(seed), data.non_tensor_batch["uid"].tolist()
    orders = (shuffled_groups(uids, generator) for _ in range(plan.epochs))
    return [rows for order in orders for rows in order.split(size)]


def global_counts(
    response_mask: Tensor, sequence_ranks: int = 1, shares: Tensor | None = None
) -> GlobalBatchInfo:
    """Counts a mini-batch's sampled tokens and sequences over all ranks: the denominators of `agg_loss`.

    A sequence is a row with any token or, with `shares` (rows,), its share of its episode. Each row is on
    `sequence_ranks` ranks, and counts once.
    """
    lengths = response_mask.sum(dim=1)
    sequences = (lengths > 0).double() * (1 if shares is None else shares)
    counts = sum_over_ranks(torch.stack([lengths.sum().double(), sequences.sum()])).tolist()
    tokens, rows = (count / sequence_ranks for count in counts)
    return GlobalBatchInfo(
        dp_size=world_size(),
        batch_num_tokens=round(tokens),
        global_batch_size=rows,
        loss_scale_factor=None,
    )


def clip_grad_norm(module: nn.Module, max_norm: float) -> Tensor:
    """Clips the gradient; returns its whole norm before that, a scalar on the CPU that is the same on every rank."""
    return full_tensor(torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm).detach()).cpu()


def say_not_finite(norm: Tensor, sums: "MetricSums", where: str) -> None:
    """Logs, on the first rank, whose loss made the gradient's norm not finite; a collective."""
    mine = torch.zeros(world_size())
    mine[rank()] = not _stack(sums._sums).isfinite().all()
    ranks = sum_over_ranks(mine).nonzero().flatten().tolist()
    if rank() == 0:
        logger.warning(
            say(
                "not_finite",
                norm=norm.item(),
                where=where,
                ranks=ranks or "none: it is the backward pass",
            )
        )


class MetricSums:
    """Keeps metrics as detached tensors until the end of the update, when one synchronisation reads them all.

    What is added is this rank's share of a mean over all ranks' tokens: `read` sums the shares, and takes the largest
    maximum. Ranks of one sequence-parallel group add the same share, which counts once.
    """

    def __init__(self, sequence_ranks: int = 1) -> None:
        self.sequence_ranks = sequence_ranks
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, Any], weight: float = 1.0) -> None:
        """Adds shares of means."""
        for name, value in metrics.items():
            value = torch.as_tensor(value).detach().float().mean() * weight
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def maximum(self, metrics: Mapping[str, Tensor]) -> None:
        """Takes maxima in."""
        for name, value in metrics.items():
            self._maxima[name] = (
                torch.maximum(self._maxima.get(name, value), value).detach().float()
            )

    def divide(self, by: float, others: Mapping[str, float]) -> None:
        """Divides all sums, those that `others` names by numbers of their own."""
        self._sums = {name: value / others.get(name, by) for name, value in self._sums.items()}

    def read(self) -> dict[str, float]:
        """Reads all of it, over all ranks."""
        sums = (sum_over_ranks(_stack(self._sums)) / self.sequence_ranks).tolist()
        maxima = max_over_ranks(_stack(self._maxima)).tolist()
        return dict(zip([*self._sums, *self._maxima], sums + maxima, strict=True))


def _stack(values: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([value.cpu() for value in values.values()]) if values else torch.zeros(0)
