"""The policy's two jobs: log-probs of given responses, and the PPO update over mini- and micro-batches.

Invariant: the gradient of a mini-batch does not depend on how it is split into micro-batches; every mean is a sum
divided by the count of the whole mini-batch, which is passed down.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from data.protocol import DataProto
from training.config import ActorConfig, MicroBatching, UpdatePlan
from training.core_algos import (
    GlobalBatchInfo,
    PolicyLossConfig,
    agg_loss,
    denominators,
    get_policy_loss_fn,
    kl_penalty,
    token_fraction,
)
from training.rollout_correction import compute_offpolicy_metrics
from workers.model.forward import PolicyModel
from workers.model.packing import (
    FORWARD_FIELDS,
    ForwardBatch,
    ForwardSettings,
    iter_micro_batches,
    loss_fields,
    read_rows,
    scatter_tokens,
)
from workers.model.update import MicroLoss, update_model
from workers.ranks.distributed import world_size


class DataParallelPPOActor:
    """Is the policy of one rank: reads log-probs off it, and updates it.

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
        self, inputs: ForwardBatch, shape: torch.Size, temperature: float, entropy: Any = "none"
    ) -> tuple[Tensor, Any]:
        """Computes log-probs and, unless `entropy` is "none", entropies of a micro-batch, each of `shape`.

        The shape is (rows, response_len); where nothing was sampled they are zero.
        """
        with self.settings.autocast():
            stats = self.actor_module(inputs, temperature, entropy)
        entropies = None if stats.entropy is None else scatter_tokens(stats.entropy, inputs, shape)
        return scatter_tokens(stats.log_probs, inputs, shape), entropies

    @torch.no_grad()
    def compute_log_prob(
        self, data: DataProto, calculate_entropy: bool = False, limits: MicroBatching | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Computes log-probs, and entropies where asked for, of every sampled token: (B, response_len) float32, CPU.

        `data` holds prompts, responses, response_mask, attention_mask and meta_info `temperature`. `limits` are those
        of a micro-batch; without them the update's own.
        """
        self.actor_module.eval()
        data.require(*FORWARD_FIELDS, by="compute_log_prob")
        mode = "value" if calculate_entropy else "none"
        read: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for rows, micro, inputs in iter_micro_batches(data, self.settings, limits or self.config.micro_batching):
            shape = micro.batch["responses"].shape
            read.append((rows, *self.forward(inputs, shape, data.meta_info["temperature"], mode)))
        log_probs = read_rows([(rows, log_probs) for rows, log_probs, _ in read])
        return log_probs, read_rows([(rows, x) for rows, _, x in read if x is not None]) if calculate_entropy else None

    def update_policy(self, data: DataProto, plan: UpdatePlan | None = None) -> dict[str, float]:
        """Passes over `data` as planned; returns the mean over mini-batches of `actor/*` metrics.

        Needs advantages, and old_log_probs unless there is a single update (then the policy's own log-probs are the old
        ones); ref_log_prob for the KL loss. Without a plan a mini-batch has `ppo_mini_batch_size` rows.
        """
        assert self.actor_optimizer is not None
        self.actor_module.train()
        cfg = self.config
        data.require(*FORWARD_FIELDS, "advantages", by="update_policy")
        if cfg.use_kl_loss:
            data.require("ref_log_prob", by="update_policy with actor.use_kl_loss")
        if plan is None:
            plan = UpdatePlan.of_rows(len(data), cfg.ppo_mini_batch_size, cfg.ppo_epochs, cfg.shuffle)
        if plan.updates > 1:
            data.require("old_log_probs", by="update_policy with several mini-batches")
        return update_model(
            self.actor_module,
            self.actor_optimizer,
            data,
            plan,
            settings=self.settings,
            limits=cfg.micro_batching,
            grad_clip=cfg.grad_clip,
            prefix="actor",
            micro_loss=self._micro_loss,
        )

    def _micro_loss(self, micro: DataProto, inputs: ForwardBatch, counts: GlobalBatchInfo) -> MicroLoss:
        cfg = self.config
        fields = loss_fields(micro, self.settings.device)
        mask = fields["response_mask"]
        log_prob, entropy = self.forward(
            inputs, mask.shape, micro.meta_info["temperature"], "grad" if cfg.entropy_coeff else "value"
        )
        # Left out only where this is the only update (`update_policy` checks): then the policy is still the one that
        # sampled.
        old_log_prob = fields.get("old_log_probs")
        old_log_prob = log_prob.detach() if old_log_prob is None else old_log_prob
        with denominators(counts):
            loss, metrics = call_policy_loss(
                cfg.policy_loss.loss_mode,
                old_log_prob=old_log_prob,
                log_prob=log_prob,
                advantages=fields["advantages"],
                response_mask=mask,
                loss_agg_mode=cfg.loss_agg_mode,
                config=self._loss_config(counts),
            )
        # A plain number is the micro-batch's mean, as losses written for verl return it.
        share = token_fraction(torch.ones_like(log_prob), mask, counts)
        metrics = {name: value if isinstance(value, Tensor) else value * share for name, value in metrics.items()}
        # The losses carry the factor of all ranks, because ranks average their gradients.
        ranks = world_size()
        metrics = {"actor/pg_loss": loss / ranks, **metrics}
        metrics["actor/entropy"] = agg_loss(entropy.detach(), mask, "token-mean", **counts) / ranks
        if cfg.entropy_coeff:
            loss = loss - cfg.entropy_coeff * agg_loss(entropy, mask, cfg.loss_agg_mode, **counts)
        if cfg.use_kl_loss:
            kl = kl_penalty(log_prob, fields["ref_log_prob"], cfg.kl_loss_type)
            kl_loss = agg_loss(kl, mask, cfg.loss_agg_mode, **counts)
            loss = loss + cfg.kl_loss_coef * kl_loss
            metrics |= {"actor/kl_loss": kl_loss / ranks}
        if "old_log_probs" in fields and (updates := micro.meta_info.get("updates_to_come")):
            # Only this one of them adds to the mean over all.
            apart = agg_loss((log_prob.detach() - old_log_prob).abs(), mask, "token-mean", **counts)
            metrics["actor/first_update_diff"] = apart * updates / ranks
        if "rollout_log_probs" not in fields or "old_log_probs" in fields:
            return MicroLoss(loss, metrics, {})
        shares, maxima = compute_offpolicy_metrics(
            log_prob.detach(), fields["rollout_log_probs"], mask, counts["batch_num_tokens"], fields.get("turn_ids")
        )
        return MicroLoss(loss, metrics | shares, maxima)

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
            f"policy loss '{name}' must return (loss, metrics), metrics being a dict; it returned "
            f"{type(result).__name__}"
        )
    return result
