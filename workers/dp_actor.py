"""The policy's two jobs: log-probs of given responses, and the PPO update over mini- and micro-batches.

Invariant: the gradient of a mini-batch does not depend on how it is split into micro-batches; every mean is a sum
divided by the count of the whole mini-batch, which is passed down.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from data.protocol import DataProto
from data.texts import say
from training import core_algos as algos
from training.batch.torch_functional import EntropyMode
from training.config import ActorConfig, MicroBatching, RolloutCorrectionConfig, UpdatePlan
from training.core_algos import GlobalBatchInfo, PolicyLossConfig
from training.rollout_correction import measure_mismatch
from workers.model import packing
from workers.model.forward import PolicyModel
from workers.model.packing import FORWARD_FIELDS, ForwardBatch, ForwardSettings
from workers.model.update import MicroLoss, update_model
from workers.ranks.distributed import world_size


class DataParallelPPOActor:
    """Is the policy of one rank: reads log-probs off it, and updates it.

    Args:
        config: `actor_rollout_ref.actor`.
        actor_module: a transformers causal language model, or a `PolicyModel` around one.
        actor_optimizer: None for a model that is only read, such as the reference.
        forward: compute type, device and packing.
        correction: `algorithm.rollout_correction`, of which bypass_mode is a loss.
        observation_loss_coef: weight of the cross-entropy on tokens of `observation_mask` (ECHO), a mean over them.
    """

    def __init__(
        self,
        config: ActorConfig,
        actor_module: nn.Module,
        actor_optimizer: torch.optim.Optimizer | None = None,
        correction: RolloutCorrectionConfig | None = None,
        observation_loss_coef: float = 0.0,
        *,
        forward: ForwardSettings | None = None,
    ) -> None:
        self.config, self.correction = config, correction or RolloutCorrectionConfig()
        self.observation_loss_coef = observation_loss_coef
        self.actor_module = actor_module if isinstance(actor_module, PolicyModel) else PolicyModel(actor_module)
        self.actor_optimizer = actor_optimizer
        self.settings = forward or ForwardSettings()

    def forward(
        self, inputs: ForwardBatch, shape: torch.Size, temperature: float, entropy: EntropyMode = "none"
    ) -> list[Tensor]:
        """Computes log-probs of a micro-batch and, unless `entropy` is "none", entropies, each of `shape`.

        The shape is (rows, response_len); where nothing was sampled they are zero. With `entropy` "squares" sums of
        squared probabilities come third.
        """
        with self.settings.autocast():
            stats = self.actor_module(inputs, temperature, entropy)
        others = () if stats.entropy is None else torch.atleast_2d(stats.entropy)
        return [packing.scatter_tokens(values, inputs, shape) for values in (stats.log_probs, *others)]

    def compute_log_prob(
        self, data: DataProto, calculate_entropy: bool = False, limits: MicroBatching | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Computes log-probs, and entropies where asked for, of every sampled token: (B, response_len) float32, CPU.

        `data` holds prompts, responses, response_mask, attention_mask and meta_info `temperature`. `limits` are those
        of a micro-batch; without them the update's own.
        """
        log_probs, *others = self.token_stats(data, "value" if calculate_entropy else "none", limits)
        return log_probs, others[0] if others else None

    @torch.no_grad()
    def token_stats(self, data: DataProto, entropy: EntropyMode, limits: MicroBatching | None = None) -> list[Tensor]:
        """Computes log-probs, entropies and sums of squared probabilities, as far as asked for; see `forward`.

        Args: see `compute_log_prob`. Returns: each (B, response_len) float32, on the CPU.
        """
        self.actor_module.eval()
        data.require(*FORWARD_FIELDS, by="compute_log_prob")
        batches = packing.iter_micro_batches(data, self.settings, limits or self.config.micro_batching)
        how = data.meta_info["temperature"], entropy
        read = [(rows, self.forward(inputs, micro.batch["responses"].shape, *how)) for rows, micro, inputs in batches]
        return [packing.read_rows([(rows, own[kind]) for rows, own in read]) for kind in range(len(read[0][1]))]

    def update_policy(self, data: DataProto, plan: UpdatePlan | None = None) -> dict[str, float]:
        """Passes over `data` as planned; returns the mean over mini-batches of `actor/*` metrics.

        Needs advantages, and old_log_probs unless there is a single update (then the policy's own log-probs are the old
        ones); ref_log_prob for the KL loss. Without a plan a mini-batch has `ppo_mini_batch_size` rows, or all.
        """
        assert self.actor_optimizer is not None
        self.actor_module.train()
        cfg = self.config
        data.require(*FORWARD_FIELDS, "advantages", by="update_policy")
        if cfg.use_kl_loss:
            data.require("ref_log_prob", by="update_policy with actor.use_kl_loss")
        plan = plan or UpdatePlan.of_rows(len(data), cfg.ppo_mini_batch_size or len(data), cfg.ppo_epochs, cfg.shuffle)
        if plan.updates > 1 and not self.correction.bypass_mode:
            data.require("old_log_probs", by="update_policy with several mini-batches")
        return update_model(self, self.actor_module, self.actor_optimizer, data, plan, "actor")

    def micro_loss(self, micro: DataProto, inputs: ForwardBatch, counts: GlobalBatchInfo) -> MicroLoss:
        """Computes the policy's loss; see `Trained`."""
        cfg = self.config
        fields = packing.loss_fields(micro, self.settings.device)
        mask, counts = fields["response_mask"], counts | {"loss_scale_factor": cfg.loss_scale_factor}
        mode: EntropyMode = "grad" if cfg.entropy_coeff else "value"
        log_prob, entropy = self.forward(inputs, mask.shape, micro.meta_info["temperature"], mode)
        # Left out only where this is the only update (`update_policy` checks): then the policy is still the one that
        # sampled.
        old_log_prob = fields.get("old_log_probs", log_prob.detach())
        bypass = self.correction.bypass_mode
        with algos.denominators(counts, fields.get("episode_share")):
            loss, metrics = call_policy_loss(
                "bypass_mode" if bypass else cfg.policy_loss.loss_mode,
                old_log_prob=fields["rollout_log_probs"] if bypass else old_log_prob,
                rollout_log_prob=fields.get("rollout_log_probs", old_log_prob),
                log_prob=log_prob,
                advantages=fields["advantages"],
                response_mask=mask,
                loss_agg_mode=cfg.loss_agg_mode,
                config=self._loss_config(counts),
                rollout_is_weights=fields.get("rollout_is_weights"),
            )
            entropy_loss = algos.agg_loss(entropy, mask, cfg.loss_agg_mode, **counts) if cfg.entropy_coeff else 0
            kl = algos.kl_penalty(log_prob, fields["ref_log_prob"], cfg.kl_loss_type) if cfg.use_kl_loss else None
            kl_loss = None if kl is None else algos.agg_loss(kl, mask, cfg.loss_agg_mode, **counts)
        # A plain number is the micro-batch's mean, as losses written for verl return it.
        share = algos.token_fraction(torch.ones_like(log_prob), mask, counts)
        metrics = {name: value if isinstance(value, Tensor) else value * share for name, value in metrics.items()}
        # The losses carry the factor of all ranks, because ranks average their gradients.
        ranks = world_size()
        metrics = {"actor/pg_loss": loss / ranks, **metrics}
        metrics["actor/entropy"] = algos.agg_loss(entropy.detach(), mask, "token-mean", **counts) / ranks
        loss = loss - cfg.entropy_coeff * entropy_loss
        if kl_loss is not None:
            loss = loss + cfg.kl_loss_coef * kl_loss
            metrics |= {"actor/kl_loss": kl_loss / ranks}
        # Only the first adds to the mean over all, where the policy is still the one that sampled.
        updates = micro.meta_info.get("updates_to_come") or 0
        if updates and "old_log_probs" in fields and not bypass:
            apart = algos.agg_loss((log_prob.detach() - old_log_prob).abs(), mask, "token-mean", **counts)
            metrics["actor/first_update_diff"] = apart * updates / ranks
        if self.observation_loss_coef:
            said = fields["observation_mask"].bool()
            observed = -torch.where(said, log_prob, 0).sum() / max(micro.meta_info["observation_tokens"], 1)
            loss = loss + self.observation_loss_coef * observed * ranks
            metrics["actor/observation_loss"] = observed
        if not updates or "rollout_log_probs" not in fields or ("old_log_probs" in fields and not bypass):
            return MicroLoss(loss, metrics, {})
        shares, maxima = measure_mismatch(
            log_prob.detach(), fields["rollout_log_probs"], mask, counts["batch_num_tokens"], fields.get("turn_ids")
        )
        return MicroLoss(loss, metrics | {name: share * updates for name, share in shares.items()}, maxima)

    def _loss_config(self, counts: GlobalBatchInfo) -> PolicyLossConfig:
        own = {name: self.config[name] for name in vars(PolicyLossConfig()) if name in vars(self.config)}
        return PolicyLossConfig(**own, rollout_correction=self.correction, global_batch_info=counts)


def call_policy_loss(name: str, **offered: Any) -> tuple[Tensor, dict[str, Any]]:
    """Runs a policy loss on those of the offered arguments that its signature takes; older ones lack some of them.

    Raises:
        ValueError: it does not return (loss, metrics).
    """
    function = algos.get_policy_loss_fn(name)
    result = function(**algos.taken(function, offered))
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise ValueError(say("loss_returns", name=name, returned=type(result).__name__))
    return result
