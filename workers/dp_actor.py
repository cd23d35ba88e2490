"""Policy and value model, two jobs each: log-probs or values of given responses, and the update over mini-batches.

Invariant: the gradient of a mini-batch does not depend on how it is split into micro-batches; every mean is a sum
divided by the count of the whole mini-batch, which is passed down.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from data.protocol import DataProto
from data.texts import say
from training import core_algos as algos
from training.batch.torch_functional import EntropyMode
from training.config import (
    ActorConfig,
    CriticConfig,
    MicroBatching,
    RolloutCorrectionConfig,
    UpdatePlan,
)
from training.core_algos import GlobalBatchInfo, PolicyLossConfig
from training.rollout_correction import compute_rollout_correction_weights, measure_mismatch
from workers.model import forward as models
from workers.model.forward import (
    FORWARD_FIELDS,
    ForwardBatch,
    ForwardSettings,
    PolicyModel,
    ValueModel,
)
from workers.model.update import MicroLoss, Trained
from workers.ranks.distributed import world_size

# What a loss reads of a micro-batch, by name; and a loss with its metrics.
Fields = dict[str, Tensor]
Loss = tuple[Tensor, dict[str, Any]]
# Of importance weights those metrics that are means over tokens.
ADDED_UP = ("mean", "oob_ratio")


class DataParallelPPOActor(Trained):
    """Is the policy of one rank: reads log-probs off it, and updates it.

    Args:
        config: `actor_rollout_ref.actor`.
        actor_module: a transformers causal language model, a `PolicyValueModel`, or a `PolicyModel` around either.
        actor_optimizer: None for a model that is only read, such as the reference.
        forward: compute type, device and packing.
        correction: `algorithm.rollout_correction`, of which bypass_mode is a loss.
        observation_loss_coef: weight of the cross-entropy on tokens of `observation_mask` (ECHO), a mean over them.
        critic: `critic`, whose loss and its weight are those of a `PolicyValueModel`'s values.
    """

    def __init__(
        self,
        config: ActorConfig,
        actor_module: nn.Module,
        actor_optimizer: Optimizer | None = None,
        correction: RolloutCorrectionConfig | None = None,
        observation_loss_coef: float = 0.0,
        *,
        forward: ForwardSettings | None = None,
        critic: CriticConfig | None = None,
    ) -> None:
        self.correction, self.critic = (
            correction or RolloutCorrectionConfig(),
            critic or CriticConfig(),
        )
        self.observation_loss_coef, self.actor_optimizer = observation_loss_coef, actor_optimizer
        self.actor_module = (
            actor_module if isinstance(actor_module, PolicyModel) else PolicyModel(actor_module)
        )
        super().__init__(config, self.actor_module, actor_optimizer, forward)

    def forward(self, data: DataProto) -> tuple[Tensor, Tensor]:
        """Computes log-probs and entropies, both with a gradient, for a loss of one's own: (B, response_len) each.

        They are float32 and on the device, of all rows in a single micro-batch; `data` is as for `compute_log_prob`.
        """
        whole = MicroBatching(micro_batch_size=len(data))
        [(rows, micro, inputs)] = models.iter_micro_batches(data, self.settings, whole)
        log_probs, entropies, *_ = self.micro_forward(micro, inputs, "grad")
        return log_probs[rows.argsort()], entropies[rows.argsort()]

    def compute_log_prob(
        self, data: DataProto, calculate_entropy: bool = False, limits: MicroBatching | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Computes log-probs, and entropies where asked for, of every sampled token: (B, response_len) float32, CPU.

        `data` holds prompts, responses, response_mask, attention_mask and, if it is not 1, meta_info `temperature`.
        `limits` are those of a micro-batch; without them the update's own.
        """
        mode: EntropyMode = "value" if calculate_entropy else "none"
        log_probs, *others = self.read(data, "compute_log_prob", limits, mode)
        return log_probs, others[0] if calculate_entropy else None

    def update_policy(self, data: DataProto, plan: UpdatePlan | None = None) -> dict[str, float]:
        """Passes over `data` as planned; returns the mean over mini-batches of `actor/*` metrics.

        Needs advantages, and old_log_probs unless there is a single update (then the policy's own log-probs are the old
        ones); ref_log_prob for the KL loss; values and returns where the model has values, whose `critic/*` come too.
        Without a plan a mini-batch has `ppo_mini_batch_size` rows, or all.
        """
        data.require(*FORWARD_FIELDS, "advantages", by="update_policy")
        if self.config.use_kl_loss:
            data.require("ref_log_prob", by="update_policy with actor.use_kl_loss")
        if self.actor_module.value_head is not None:
            data.require("values", "returns", by="update_policy with critic.share_backbone")
        plan = plan or self.plan(len(data))
        if plan.updates > 1 and not self.correction.bypass_mode:
            data.require("old_log_probs", by="update_policy with several mini-batches")
        return self.update(data, plan, "actor")

    def micro_loss(
        self, micro: DataProto, inputs: ForwardBatch, counts: GlobalBatchInfo
    ) -> MicroLoss:
        """Computes the policy's loss and, weighed, its values'; see `Trained`."""
        cfg, ranks = self.config, world_size()
        fields = models.loss_fields(micro, self.settings.device)
        mask, measured = (
            fields["response_mask"],
            "old_log_probs" in fields and not self.correction.bypass_mode,
        )
        mode: EntropyMode = "grad" if cfg.entropy_coeff else "value"
        log_prob, entropy, *values = self.micro_forward(micro, inputs, mode)
        # Left out only where this is the only update (`update_policy` checks): then the policy is still the one that
        # sampled.
        own = log_prob.detach()
        old_log_prob = fields.setdefault("old_log_probs", own)
        weighed: dict[str, Any] = {}
        if old_log_prob is own and self.correction.weighs_alone:
            rule = self.correction.rollout_is, self.correction.rollout_is_threshold
            apart = own - fields["rollout_log_probs"]
            fields["rollout_is_weights"], told = compute_rollout_correction_weights(
                apart, mask, *rule
            )
            share = algos.token_fraction(torch.ones_like(own), mask, counts)
            weighed = {
                f"rollout_corr/rollout_is_{name}": told[f"rollout_is_{name}"] * share
                for name in ADDED_UP
            }
        loss, metrics = self._policy_loss(fields, log_prob, entropy, counts)
        metrics |= weighed
        if values:
            of_values, more = value_loss(values[0], fields, self.critic, counts)
            loss, metrics = loss + self.critic.value_loss_coef * of_values, metrics | more
        if self.observation_loss_coef:
            said = fields["observation_mask"].bool()
            observed = -torch.where(said, log_prob, 0).sum() / max(
                micro.meta_info["observation_tokens"], 1
            )
            loss, metrics["actor/observation_loss"] = (
                loss + self.observation_loss_coef * observed * ranks,
                observed,
            )
        # Only the first adds to the mean over all, where the policy is still the one that sampled.
        updates = micro.meta_info.get("updates_to_come") or 0
        if updates and measured:
            apart = algos.agg_loss((own - old_log_prob).abs(), mask, "token-mean", **counts)
            metrics["actor/first_update_diff"] = apart * updates / ranks
        if not updates or measured or "rollout_log_probs" not in fields:
            return MicroLoss(loss, metrics, {})
        compared = (
            own,
            fields["rollout_log_probs"],
            mask,
            counts["batch_num_tokens"],
            fields.get("turn_ids"),
        )
        shares, maxima = measure_mismatch(*compared)
        return MicroLoss(
            loss, metrics | {name: share * updates for name, share in shares.items()}, maxima
        )

    def _policy_loss(
        self, fields: Fields, log_prob: Tensor, entropy: Tensor, counts: GlobalBatchInfo
    ) -> Loss:
        """Computes the clipped loss, less the entropy's bonus, plus the KL's part; and its `actor/*`."""
        cfg, mask, bypass, ranks = (
            self.config,
            fields["response_mask"],
            self.correction.bypass_mode,
            world_size(),
        )
        counts = counts | {"loss_scale_factor": cfg.loss_scale_factor}
        own = {name: cfg[name] for name in vars(PolicyLossConfig()) if name in vars(cfg)}
        with algos.denominators(counts, fields.get("episode_share")):
            loss, metrics = call_policy_loss(
                "bypass_mode" if bypass else cfg.policy_loss.loss_mode,
                old_log_prob=fields["rollout_log_probs" if bypass else "old_log_probs"],
                rollout_log_prob=fields.get("rollout_log_probs", fields["old_log_probs"]),
                log_prob=log_prob,
                advantages=fields["advantages"],
                response_mask=mask,
                loss_agg_mode=cfg.loss_agg_mode,
                config=PolicyLossConfig(
                    **own, rollout_correction=self.correction, global_batch_info=counts
                ),
                rollout_is_weights=fields.get("rollout_is_weights"),
            )
            # A plain number is the micro-batch's mean, as losses written for verl return it.
            share = algos.token_fraction(torch.ones_like(log_prob), mask, counts)
            metrics = {
                name: value if isinstance(value, Tensor) else value * share
                for name, value in metrics.items()
            }
            # The losses carry the factor of all ranks, because ranks average their gradients.
            metrics = {"actor/pg_loss": loss / ranks, **metrics}
            metrics["actor/entropy"] = (
                algos.agg_loss(entropy.detach(), mask, "token-mean", **counts) / ranks
            )
            if cfg.entropy_coeff:
                loss = loss - cfg.entropy_coeff * algos.agg_loss(
                    entropy, mask, cfg.loss_agg_mode, **counts
                )
            if cfg.use_kl_loss:
                kl = algos.kl_penalty(log_prob, fields["ref_log_prob"], cfg.kl_loss_type)
                kl_loss = algos.agg_loss(kl, mask, cfg.loss_agg_mode, **counts)
                loss, metrics["actor/kl_loss"] = loss + cfg.kl_loss_coef * kl_loss, kl_loss / ranks
        return loss, metrics


def call_policy_loss(name: str, **offered: Any) -> Loss:
    """Runs a policy loss on those of the offered arguments that its signature takes; older ones lack some of them.

    Raises:
        ValueError: it does not return (loss, metrics).
    """
    function = algos.get_policy_loss_fn(name)
    result = function(**algos.taken(function, offered))
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise ValueError(say("loss_returns", name=name, returned=type(result).__name__))
    return result


class DataParallelPPOCritic(Trained):
    """Is the value model of one rank; arguments as for `DataParallelPPOActor`."""

    def __init__(
        self,
        config: CriticConfig,
        critic_module: nn.Module,
        critic_optimizer: Optimizer | None = None,
        *,
        forward: ForwardSettings | None = None,
    ) -> None:
        self.critic_module = (
            critic_module if isinstance(critic_module, ValueModel) else ValueModel(critic_module)
        )
        super().__init__(config, self.critic_module, critic_optimizer, forward)

    def compute_values(self, data: DataProto) -> Tensor:
        """Computes the value of the state before each sampled token: (B, response_len) float32, CPU, zero elsewhere."""
        return self.read(data, "compute_values", None)[0]

    def update_critic(self, data: DataProto, plan: UpdatePlan | None = None) -> dict[str, float]:
        """Regresses on `returns`, clipped around `values`, as planned; returns the mean `critic/*` of mini-batches.

        Without a plan a mini-batch has `ppo_mini_batch_size` rows, or all.
        """
        data.require(*FORWARD_FIELDS, "values", "returns", by="update_critic")
        return self.update(data, plan, "critic")

    def micro_loss(
        self, micro: DataProto, inputs: ForwardBatch, counts: GlobalBatchInfo
    ) -> MicroLoss:
        """Computes the values' loss; see `Trained`."""
        fields = models.loss_fields(micro, self.settings.device)
        return MicroLoss(
            *value_loss(self.micro_forward(micro, inputs)[0], fields, self.config, counts), {}
        )


def value_loss(
    vpreds: Tensor, fields: Fields, config: CriticConfig, counts: GlobalBatchInfo
) -> Loss:
    """Computes the loss of a micro-batch's values (rows, response_len), and its `critic/*`; see `MicroLoss`."""
    mask, compared = fields["response_mask"], (vpreds, fields["returns"], fields["values"])
    rule = config.cliprange_value, config.loss_agg_mode
    with algos.denominators(counts, fields.get("episode_share")):
        loss, clip_fraction = algos.compute_value_loss(*compared, mask, *rule, **counts)
    mean = (vpreds.detach() * mask).sum() / max(counts["batch_num_tokens"] or 0, 1)
    metrics = {"vf_loss": loss / world_size(), "vf_clipfrac": clip_fraction, "vpred_mean": mean}
    return loss, {f"critic/{name}": value for name, value in metrics.items()}
