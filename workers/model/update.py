"""What actor and critic share: an optimiser, its schedule, and the loops over mini- and micro-batches.

Invariant: the gradient of a mini-batch does not depend on how it is cut into micro-batches, or over ranks; every mean
is a sum divided by the count of the whole mini-batch over all ranks, which is passed down.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
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
from workers.ranks.distributed import full_tensor, max_over_ranks, sum_over_ranks, world_size


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
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else int(optim.lr_warmup_steps_ratio * total_steps)
    shape = optimizer, warmup, total_steps, optim.min_lr_ratio
    if optim.scheduler == "constant":
        return schedules.get_constant_schedule_with_warmup(optimizer, warmup)
    if optim.scheduler == "cosine":
        return schedules.get_cosine_schedule_with_warmup(*shape, optim.num_cycles)
    return schedules.get_wsd_schedule_with_warmup(*shape)


class Trained(ABC):
    """Is a model that a rank reads and trains, the policy or the critic; `config` is its section of the settings."""

    def __init__(
        self, config: Any, module: nn.Module, optimizer: Optimizer | None, settings: ForwardSettings | None
    ) -> None:
        self.config, self.module, self.optimizer = config, module, optimizer
        self.settings = settings or ForwardSettings()

    def micro_forward(self, micro: DataProto, inputs: ForwardBatch, *how: Any) -> list[Tensor]:
        """Computes what the module says of sampled tokens: each (rows, response_len), zero where none was sampled."""
        with self.settings.autocast():
            kinds = self.module(inputs, *how)
        return [scatter_tokens(kind, inputs, micro.batch["responses"].shape) for kind in kinds]

    @abstractmethod
    def micro_loss(self, micro: DataProto, inputs: ForwardBatch, counts: GlobalBatchInfo) -> MicroLoss:
        """Computes what a micro-batch adds, given the counts of its mini-batch."""

    @torch.no_grad()
    def read(self, data: DataProto, by: str, limits: MicroBatching | None, *how: Any) -> list[Tensor]:
        """Reads what the module says of all rows: each (B, response_len) float32, on the CPU."""
        self.module.eval()
        data.require(*FORWARD_FIELDS, by=by)
        batches = iter_micro_batches(data, self.settings, limits or self.config.micro_batching)
        read = [(rows, self.micro_forward(micro, inputs, *how)) for rows, micro, inputs in batches]
        return [read_rows([(rows, own[kind]) for rows, own in read]) for kind in range(len(read[0][1]))]

    def update(self, data: DataProto, plan: UpdatePlan | None, prefix: str) -> dict[str, float]:
        """Passes over the rows as planned, with one optimiser step for each mini-batch; returns their mean metrics.

        Args:
            plan: None: a mini-batch has `ppo_mini_batch_size` rows, or all.
            prefix: of the metrics `grad_norm` and `skipped_updates` (those with a norm that is not finite).
        """
        settings, config, optimizer = self.settings, self.config, self.optimizer
        assert optimizer is not None
        self.module.train()
        plan, ranks = plan or self.plan(len(data)), settings.sequence_ranks
        sums, weight, share = MetricSums(ranks), 1 / plan.updates, ranks / world_size()
        for number, rows in enumerate(rows_of_updates(data, plan)):
            mini = data.select_idxs(rows)
            mini.meta_info["updates_to_come"] = plan.updates if number == 0 else None
            counts = global_counts(mini.batch["response_mask"], ranks, mini.batch.get("episode_share", None))
            if "observation_mask" in mini.batch:
                observed = sum_over_ranks(mini.batch["observation_mask"].sum())
                mini.meta_info["observation_tokens"] = int(observed) // ranks
            optimizer.zero_grad(set_to_none=True)
            for _, micro, inputs in iter_micro_batches(mini, settings, config.micro_batching):
                loss, metrics, maxima = self.micro_loss(micro, inputs, counts)
                loss.backward()
                sums.add(metrics, weight)
                sums.maximum(maxima)
            norm = clip_grad_norm(self.module, config.grad_clip)
            # With nothing to learn from, momentum alone would move the weights.
            if torch.isfinite(norm) and counts["batch_num_tokens"]:
                optimizer.step()
            # Every rank has the same norm.
            sums.add({f"{prefix}/grad_norm": norm}, weight * share)
            sums.add({f"{prefix}/skipped_updates": ~torch.isfinite(norm)}, share)
        # Nothing reads them until the next update; what generates meanwhile may have their memory.
        optimizer.zero_grad(set_to_none=True)
        return sums.read()

    def plan(self, rows: int) -> UpdatePlan:
        """Plans an update by the settings alone."""
        config = self.config
        return UpdatePlan.of_rows(rows, config.ppo_mini_batch_size or rows, config.ppo_epochs or 1, config.shuffle)


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


def global_counts(response_mask: Tensor, sequence_ranks: int = 1, shares: Tensor | None = None) -> GlobalBatchInfo:
    """Counts a mini-batch's sampled tokens and sequences over all ranks: the denominators of `agg_loss`.

    A sequence is a row with any token or, with `shares` (rows,), its share of its episode. Each row is on
    `sequence_ranks` ranks, and counts once.
    """
    lengths = response_mask.sum(dim=1)
    sequences = (lengths > 0).double() * (1 if shares is None else shares)
    counts = sum_over_ranks(torch.stack([lengths.sum().double(), sequences.sum()])).tolist()
    tokens, rows = (count / sequence_ranks for count in counts)
    return GlobalBatchInfo(
        dp_size=world_size(), batch_num_tokens=round(tokens), global_batch_size=rows, loss_scale_factor=None
    )


def clip_grad_norm(module: nn.Module, max_norm: float) -> Tensor:
    """Clips the gradient; returns its whole norm before that, a scalar on the CPU that is the same on every rank."""
    return full_tensor(torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm).detach()).cpu()


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
            self._maxima[name] = torch.maximum(self._maxima.get(name, value), value).detach().float()

    def read(self) -> dict[str, float]:
        """Reads all of it, over all ranks."""
        sums = (sum_over_ranks(_stack(self._sums)) / self.sequence_ranks).tolist()
        maxima = max_over_ranks(_stack(self._maxima)).tolist()
        return dict(zip([*self._sums, *self._maxima], sums + maxima, strict=True))


def _stack(values: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([value.cpu() for value in values.values()]) if values else torch.zeros(0)
