"""The policy's two jobs: log-probs of given responses, and the PPO update over mini- and micro-batches.

Invariant: the gradient of a mini-batch does not depend on how it is split into micro-batches; every mean is a sum divided by the count of
the whole mini-batch, which is passed down.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from data.protocol import DataProto
from data.seeding import seed_for
from training.batching import plan_mini_batches, shuffled_groups
from training.config import ActorConfig, MicroBatching
from training.core_algos import GlobalBatchInfo, PolicyLossConfig, agg_loss, get_policy_loss_fn, kl_penalty
from training.rollout_correction import compute_offpolicy_metrics
from workers.distributed import full_tensor, max_over_ranks, sum_over_ranks, world_size
from workers.forward import (
    ForwardSettings,
    PolicyModel,
    TreeBatch,
    iter_micro_batches,
    on_grid,
)

UPDATE_FIELDS = ("prompts", "responses", "response_mask", "attention_mask", "advantages")


def global_counts(response_mask: Tensor, sequence_ranks: int = 1) -> GlobalBatchInfo:
    """The denominators of a mini-batch over all ranks, in the keys of `agg_loss`: sampled tokens and the rows that have any.

    Each row is on `sequence_ranks` ranks, and counts once.
    """
    lengths = response_mask.sum(dim=1)
    counts = sum_over_ranks(torch.stack([lengths.sum(), (lengths > 0).sum()])).tolist()
    tokens, rows = (count // sequence_ranks for count in counts)
    return GlobalBatchInfo(
        dp_size=world_size(), batch_num_tokens=tokens, global_batch_size=rows, loss_scale_factor=None
    )


def order_rows(data: DataProto, epochs: int, shuffle: bool, mini_batch_rows: int) -> list[Tensor]:
    """The row numbers of every mini-batch of an update, epoch by epoch; shuffling keeps a group's rows together.

    meta_info `seed` and `global_steps` seed the shuffling.
    """
    generator = torch.Generator()
    if shuffle:
        generator.manual_seed(seed_for(data.meta_info["seed"], data.meta_info["global_steps"], 0))
    batches = []
    for _ in range(epochs):
        order = (
            shuffled_groups(data.non_tensor_batch["uid"].tolist(), generator) if shuffle else torch.arange(len(data))
        )
        batches += [order[list(rows)] for rows in plan_mini_batches(len(data), mini_batch_rows)]
    return batches


class MetricSums:
    """Metrics as detached tensors until the end of the update, when one synchronisation reads them all.

    What is added is this rank's share of a mean over all ranks' tokens: `read` sums the shares, and takes the largest maximum.
    Ranks that share sequences add the same share, which counts once.
    """

    def __init__(self, sequence_ranks: int = 1) -> None:
        self.sequence_ranks = sequence_ranks
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, metrics: dict[str, Any], weight: float = 1.0) -> None:
        for name, value in metrics.items():
            value = torch.as_tensor(value).detach().float().mean() * weight
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def add_norm(self, prefix: str, norm: Tensor, weight: float) -> None:
        """The gradient's norm before clipping and whether its update was skipped: every rank has the same."""
        share = self.sequence_ranks / world_size()
        self.add({f"{prefix}/grad_norm": norm}, weight * share)
        self.add({f"{prefix}/skipped_updates": ~torch.isfinite(norm)}, share)

    def maximum(self, metrics: dict[str, Tensor]) -> None:
        for name, value in metrics.items():
            value = value.detach().float()
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def read(self) -> dict[str, float]:
        sums = (sum_over_ranks(_stack(self._sums)) / self.sequence_ranks).tolist()
        maxima = max_over_ranks(_stack(self._maxima)).tolist()
        return dict(zip([*self._sums, *self._maxima], sums + maxima, strict=True))


def _stack(values: dict[str, Tensor]) -> Tensor:
    return torch.stack([value.cpu() for value in values.values()]) if values else torch.zeros(0)


class DataParallelPPOActor:
    """The policy of one rank.

    Args:
        config: `actor_rollout_ref.actor`.
        actor_module: a transformers causal language model, or a `PolicyModel` around one.
        actor_optimizer: None for a model that is only read, such as the reference.
        forward: compute type, device and packing.
    """

    def __init__(
        self,
        config: ActorConfig,
        actor_module: nn.Module,
        actor_optimizer: torch.optim.Optimizer | None = None,
        *,
        forward: ForwardSettings | None = None,
    ) -> None:
        self.config = config
        self.actor_module = actor_module if isinstance(actor_module, PolicyModel) else PolicyModel(actor_module)
        self.actor_optimizer = actor_optimizer
        self.settings = forward or ForwardSettings()

    def forward(
        self, trees: TreeBatch, shape: torch.Size, temperature: float, entropy: Any = "none"
    ) -> tuple[Tensor, Any]:
        """Log-probs and, unless `entropy` is "none", entropies on the micro-batch's (rows, response_len) grid, zero where nothing was sampled."""
        with self.settings.autocast():
            stats = self.actor_module(trees, temperature, entropy)
        entropies = None if stats.entropy is None else on_grid(stats.entropy, trees, shape)
        return on_grid(stats.log_probs, trees, shape), entropies

    @torch.no_grad()
    def compute_log_prob(
        self, data: DataProto, calculate_entropy: bool = False, limits: MicroBatching | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs, and entropies where asked for, of every sampled token: (B, response_len) float32 on the CPU.

        `data` holds prompts, responses, response_mask, attention_mask and meta_info `temperature`. `limits` are the micro-batch limits;
        without them the update's own.
        """
        self.actor_module.eval()
        data.require("prompts", "responses", "response_mask", "attention_mask", by="compute_log_prob")
        log_probs = torch.zeros(data.batch["responses"].shape)
        entropies = torch.zeros_like(log_probs) if calculate_entropy else None
        for rows, micro, trees in iter_micro_batches(data, self.settings, limits or self.config.micro_batching):
            shape = micro.batch["responses"].shape
            lp, ent = self.forward(
                trees, shape, data.meta_info["temperature"], "value" if calculate_entropy else "none"
            )
            log_probs[rows] = lp.cpu()
            if entropies is not None and ent is not None:
                entropies[rows] = ent.cpu()
        return log_probs, entropies

    def update_policy(self, data: DataProto, mini_batch_rows: int | None = None) -> dict[str, float]:
        """`ppo_epochs` passes over `data` in mini-batches of `mini_batch_rows` rows (default: `ppo_mini_batch_size` rows).

        Needs advantages, and old_log_probs unless there is exactly one mini-batch and one epoch (then the policy's own log-probs are the
        old ones); ref_log_prob for the KL loss. Returns the mean over mini-batches of `actor/*` metrics.
        """
        self.actor_module.train()
        data.require(*UPDATE_FIELDS, by="update_policy")
        if self.config.use_kl_loss:
            data.require("ref_log_prob", by="update_policy with actor.use_kl_loss")
        cfg = self.config
        batches = order_rows(data, cfg.ppo_epochs, cfg.shuffle, mini_batch_rows or cfg.ppo_mini_batch_size)
        if len(batches) > 1:
            data.require("old_log_probs", by="update_policy with several mini-batches")
        sums = MetricSums(self.settings.sequence_ranks)
        for rows in batches:
            self._update_mini_batch(data.select_idxs(rows), sums, 1 / len(batches))
        return sums.read()

    def _update_mini_batch(self, mini: DataProto, sums: MetricSums, weight: float) -> None:
        assert self.actor_optimizer is not None
        counts = global_counts(mini.batch["response_mask"], self.settings.sequence_ranks)
        self.actor_optimizer.zero_grad(set_to_none=True)
        for _, micro, trees in iter_micro_batches(mini, self.settings, self.config.micro_batching):
            loss, metrics = self._micro_loss(micro, trees, counts, sums)
            loss.backward()
            sums.add(metrics, weight)
        norm = clip_grad_norm(self.actor_module, self.config.grad_clip)
        if (
            torch.isfinite(norm) and counts["batch_num_tokens"]
        ):  # with nothing to learn from, momentum alone would move the weights
            self.actor_optimizer.step()
        sums.add_norm("actor", norm, weight)

    def _micro_loss(
        self, micro: DataProto, trees: TreeBatch, counts: GlobalBatchInfo, sums: MetricSums
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the mini-batch's loss, with the same share of each metric."""
        cfg = self.config
        fields = micro.batch.to(self.settings.device)
        mask = fields["response_mask"]
        log_prob, entropy = self.forward(
            trees, mask.shape, micro.meta_info["temperature"], "grad" if cfg.entropy_coeff else "value"
        )
        # Left out only where this is the first and only update: then the policy is still the one that sampled (`update_policy` checks).
        old_log_prob = fields.get("old_log_probs", None)
        old_log_prob = log_prob.detach() if old_log_prob is None else old_log_prob
        loss, metrics = call_policy_loss(
            cfg.policy_loss.loss_mode,
            old_log_prob=old_log_prob,
            log_prob=log_prob,
            advantages=fields["advantages"],
            response_mask=mask,
            loss_agg_mode=cfg.loss_agg_mode,
            config=self._loss_config(counts),
        )
        ranks = world_size()  # the losses carry this factor, because ranks average their gradients
        metrics = {"actor/pg_loss": loss / ranks, **metrics}
        metrics["actor/entropy"] = agg_loss(entropy.detach(), mask, "token-mean", **counts) / ranks
        if cfg.entropy_coeff:
            loss = loss - cfg.entropy_coeff * agg_loss(entropy, mask, cfg.loss_agg_mode, **counts)
        if cfg.use_kl_loss:
            kl = kl_penalty(log_prob, fields["ref_log_prob"], cfg.kl_loss_type)
            kl_loss = agg_loss(kl, mask, cfg.loss_agg_mode, **counts)
            loss = loss + cfg.kl_loss_coef * kl_loss
            metrics |= {"actor/kl_loss": kl_loss / ranks}
        if "rollout_log_probs" in fields and "old_log_probs" not in fields:
            shares, largest = compute_offpolicy_metrics(
                log_prob.detach(), fields["rollout_log_probs"], mask, counts["batch_num_tokens"]
            )
            metrics |= shares
            sums.maximum(largest)
        return loss, metrics

    def _loss_config(self, counts: GlobalBatchInfo) -> PolicyLossConfig:
        cfg = self.config
        return PolicyLossConfig(
            clip_ratio=cfg.clip_ratio,
            clip_ratio_low=cfg.clip_ratio_low,
            clip_ratio_high=cfg.clip_ratio_high,
            clip_ratio_c=cfg.clip_ratio_c,
            loss_agg_mode=cfg.loss_agg_mode,
            policy_loss=cfg.policy_loss,
            global_batch_info=counts,
        )


def call_policy_loss(name: str, **offered: Any) -> tuple[Tensor, dict[str, Any]]:
    """Runs a policy loss on those of the offered arguments that its signature takes; older ones lack some of them.

    Raises:
        ValueError: it does not return (loss, metrics).
    """
    function = get_policy_loss_fn(name)
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    result = function(**{key: value for key, value in offered.items() if takes_all or key in parameters})
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise ValueError(
            f"policy loss '{name}' must return (loss, metrics), metrics being a dict; it returned {type(result).__name__}"
        )
    return result


def clip_grad_norm(module: nn.Module, max_norm: float) -> Tensor:
    """The whole gradient's norm before clipping, as a scalar on the CPU; the same on every rank."""
    return full_tensor(torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm).detach()).cpu()
