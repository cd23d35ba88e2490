"""The policy of one rank: log-probs of responses, and the losses of an update.

What people change first stands in `micro_loss`: policy loss, entropy bonus, KL loss, values,
observations, features' terms (workers/model/loss_terms.py), one after the other. A field of the
batch that a loss is to read is named in workers/model/loss_fields.py; the loops over mini-batches
and micro-batches, and the optimiser's step, stand in workers/model/update_loop.py.

Invariant: the gradient of a mini-batch does not depend on how it is split into micro-batches; every
mean is a sum divided by the count of the whole mini-batch, which is passed down.
"""

from collections.abc import Sequence
from dataclasses import fields as fields_of
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from data.own_names import keep_own
from data.protocol import DataProto
from training import core_algos as algos
from training.batch.head import BANNED, EntropyMode
from training.config import (
    ActorConfig,
    CriticConfig,
    MicroBatching,
    RolloutCorrectionConfig,
    RunLossConfig,
    UpdatePlan,
)
from training.core_algos import GlobalBatchInfo
from workers.dp_critic import value_loss
from workers.model.forward_settings import ForwardSettings
from workers.model.further_rows import FurtherRows
from workers.model.loss_fields import (
    CANDIDATES,
    FORWARD_FIELDS,
    LossFields,
    loss_fields,
    with_forward_fields,
)
from workers.model.loss_terms import TERM_COUNTS, LossTerms
from workers.model.micro_batches import iter_micro_batches, scatter_tokens
from workers.model.packing import ForwardBatch
from workers.model.policy_model import PolicyModel
from workers.model.probe import MiniBatch
from workers.model.probe_set import UpdateProbes
from workers.model.update_loop import MicroLoss, UpdateLoop
from workers.model.update_metrics import MetricSums, StepNames
from workers.ranks.process_groups import rank, world_size

# A loss, and its metrics.
Loss = tuple[Tensor, dict[str, Any]]
# These metrics of the importance weights are means over tokens, which micro-batches add up to.
WEIGHT_MEANS = ("rollout_is_mean", "rollout_is_oob_ratio")


class DataParallelPPOActor(UpdateLoop):
    """Reads log-probs off the policy of one rank, and updates it.

    Args:
        config: `actor_rollout_ref.actor`.
        actor_module: a transformers causal language model, a `PolicyValueModel`, or a `PolicyModel`
            around either.
        actor_optimizer: None for a model that is only read, such as the reference.
        correction: `algorithm.rollout_correction`, of which bypass_mode is a loss.
        observation_loss_coef: weight of the cross-entropy on tokens of `observation_mask` (ECHO), a
            mean over them.
        forward: compute type, device and packing.
        critic: `critic`, whose loss and its weight are those of a `PolicyValueModel`'s values.
        probes: what measures its updates.
        terms: what features add to its loss.
    """

    name = "actor"
    # What features have each update learn beside its rows.
    further_rows: Sequence[FurtherRows] = ()

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
        probes: UpdateProbes | None = None,
        terms: LossTerms | None = None,
    ) -> None:
        if not isinstance(actor_module, PolicyModel):
            actor_module = PolicyModel(actor_module)
        self.actor_module = actor_module
        self.actor_optimizer = actor_optimizer
        self.correction = correction or RolloutCorrectionConfig()
        self.observation_loss_coef = observation_loss_coef
        self.critic_config = critic or CriticConfig()
        self.terms = terms or LossTerms()
        super().__init__(
            config,
            actor_module,
            actor_optimizer,
            forward,
            probes,
            trained=actor_module.trained,
        )

    def forward(self, data: DataProto) -> tuple[Tensor, Tensor]:
        """Computes log-probs and entropies with a gradient: (B, response_len) each.

        They are for a loss of one's own: float32 and on the device, of all rows in a single
        micro-batch. `data` is as for `compute_log_prob`.
        """
        data = with_forward_fields(data)
        limits = MicroBatching(micro_batch_size=len(data))
        [(rows, micro, inputs)] = iter_micro_batches(data, self.settings, limits)
        log_probs, entropies, *_ = self.micro_forward(micro, inputs, "grad")
        order = rows.argsort()
        return log_probs[order], entropies[order]

    def compute_log_prob(
        self, data: DataProto, calculate_entropy: bool = False, limits: MicroBatching | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Computes log-probs and, if asked for, entropies: (B, response_len) float32 each, CPU.

        `data` holds prompts, responses, response_mask, attention_mask, or verl's input_ids for the
        prompts, and, if it is not 1, meta_info `temperature`. `limits` are those of a micro-batch;
        without them the update's own.
        """
        if calculate_entropy:
            log_probs, entropies, *_ = self.read(data, "compute_log_prob", limits, "value")
            return log_probs, entropies
        log_probs, *_ = self.read(data, "compute_log_prob", limits, "none")
        return log_probs, None

    def update_policy(self, data: DataProto, plan: UpdatePlan | None = None) -> dict[str, float]:
        """Passes over `data` as planned; returns the mean over mini-batches of `actor/*` metrics.

        Needs advantages, and old_log_probs unless there is a single update (then the policy's own
        log-probs are the old ones); ref_log_prob for the KL loss; values and returns where the
        model has values, whose `critic/*` come too. Without a plan a mini-batch has
        `ppo_mini_batch_size` rows, or all.
        """
        data = with_forward_fields(data)
        data.require(*FORWARD_FIELDS, "advantages", by="update_policy")
        if self.config.use_kl_loss:
            data.require("ref_log_prob", by="update_policy with actor.use_kl_loss")
        if self.actor_module.value_head is not None:
            data.require("values", "returns", by="update_policy with critic.share_backbone")
        plan = plan or self.default_plan(len(data))
        if plan.updates > 1 and not self.correction.bypass_mode:
            data.require("old_log_probs", by="update_policy with several mini-batches")
        return self.update(self.terms.prepared(data), plan)

    def micro_loss(
        self, micro: DataProto, inputs: ForwardBatch, counts: GlobalBatchInfo
    ) -> MicroLoss:
        """Computes the loss of one micro-batch, and its metrics; see `UpdateLoop.micro_loss`.

        Losses carry the factor of all ranks, because ranks average their gradients; metrics do not.
        """
        config = self.config
        ranks = world_size()
        fields = loss_fields(micro, self.settings.device)
        mask = fields["response_mask"]  # (rows, response_len), as all that follows
        entropy_mode: EntropyMode = "grad" if config.entropy_coeff else "value"
        log_prob, entropy, *others = self.micro_forward(micro, inputs, entropy_mode)
        candidates = others.pop() if micro.meta_info.get(CANDIDATES) else None
        values = others[0] if others else None
        outputs = {"log_prob": log_prob, "entropy": entropy}

        weight_metrics = {}
        if "old_log_probs" not in fields:
            # The only update (`update_policy` checks): the policy is still the one that sampled.
            fields["old_log_probs"] = log_prob.detach()
            weight_metrics = self._weigh_by_own_log_probs(fields, counts)

        counts_of_policy = counts | {"loss_scale_factor": config.loss_scale_factor}
        row_weights = fields.get("episode_share")
        loss, metrics = self._policy_loss(fields, log_prob, counts_of_policy)

        # This micro-batch's share of the mini-batch's mean, as everything that is aggregated.
        entropy_share = algos.aggregate(entropy.detach(), mask, "token-mean", **counts_of_policy)
        metrics["actor/entropy"] = entropy_share / ranks
        if config.entropy_coeff:
            bonus = algos.aggregate(
                entropy, mask, config.aggregation, **counts_of_policy, row_weights=row_weights
            )
            loss = loss - config.entropy_coeff * bonus
        if config.use_kl_loss:
            kl_loss = self._kl_loss(fields, log_prob, counts_of_policy)
            loss = loss + config.kl_loss_coef * kl_loss
            metrics["actor/kl_loss"] = kl_loss / ranks
        metrics.update(weight_metrics)
        if "routed_experts" in micro.batch:
            metrics.update(self._measure_routing(inputs, mask, counts))

        # Where the policy's model has values (critic.share_backbone).
        if values is not None:
            critic_loss, critic_metrics = value_loss(values, fields, self.critic_config, counts)
            loss = loss + self.critic_config.value_loss_coef * critic_loss
            metrics.update(critic_metrics)
            outputs["values"] = values

        if self.observation_loss_coef:
            observation_loss = self._observation_loss(log_prob, fields, micro)
            loss = loss + self.observation_loss_coef * observation_loss * ranks
            metrics["actor/observation_loss"] = observation_loss

        if self.terms:
            of_terms, term_metrics = self.terms.add(
                micro, fields, outputs, candidates, self.settings.device
            )
            loss = loss + of_terms
            metrics.update(term_metrics)

        return MicroLoss(loss, metrics, fields, outputs)

    def _further_counts(self, rows: DataProto) -> dict[str, Any]:
        """Counts what the terms of the loss divide by."""
        if not self.terms:
            return {}
        return {TERM_COUNTS: self.terms.counts(rows, self.settings.sequence_ranks)}

    def _has_something(self, counts: GlobalBatchInfo, rows: DataProto) -> bool:
        """Checks whether the policy's loss has a token, or a term of the loss counts anything."""
        counted = rows.meta_info.get(TERM_COUNTS, {}).values()
        return super()._has_something(counts, rows) or any(counted)

    def _measure_routing(
        self, inputs: ForwardBatch, mask: Tensor, counts: GlobalBatchInfo
    ) -> dict[str, Tensor]:
        """Measures how far the engine's choices of experts are from the model's own.

        Returns: this micro-batch's shares of means over sampled tokens, of the states that predict
            them.
        """
        assert inputs.router_pass is not None
        per_token = {
            "actor/router_replay_differing": inputs.router_pass.share_differing(),
            "actor/router_replay_absent": inputs.router_pass.share_absent(),
        }
        metrics = {}
        for name, values in per_token.items():
            states = values[inputs.logit_positions]  # (N,)
            shares = scatter_tokens(states, inputs, mask.shape)  # (rows, response_len)
            metrics[name] = algos.token_fraction(shares, mask, counts)
        return metrics

    def _observation_loss(self, log_prob: Tensor, fields: LossFields, micro: DataProto) -> Tensor:
        """Computes this micro-batch's share of the mean loss of the environment's tokens."""
        return mean_observation_loss(
            log_prob, fields["observation_mask"], micro.meta_info["observation_tokens"]
        )

    def _kl_loss(self, fields: LossFields, log_prob: Tensor, counts: GlobalBatchInfo) -> Tensor:
        """Computes the mean KL to the reference policy, by `kl_loss_type`."""
        kl = algos.kl_penalty(log_prob, fields["ref_log_prob"], self.config.kl_loss_type)
        return algos.aggregate(
            kl,
            fields["response_mask"],
            self.config.aggregation,
            **counts,
            row_weights=fields.get("episode_share"),
        )

    def _policy_loss(self, fields: LossFields, log_prob: Tensor, counts: GlobalBatchInfo) -> Loss:
        """Computes the loss that `policy_loss.loss_mode` names, or bypass_mode's; and metrics."""
        old_log_prob = fields["old_log_probs"]
        rollout_log_prob = fields.get("rollout_log_probs", old_log_prob)
        name = self.config.policy_loss.loss_mode
        if self.correction.bypass_mode:
            name = "bypass_mode"
            old_log_prob = fields["rollout_log_probs"]
        config = policy_loss_config(self.config, self.correction, counts)
        weights = fields.get("rollout_is_weights")
        row_weights = fields.get("episode_share")
        formula = algos.policy_loss_formula(name)
        if formula is not None:
            inputs = algos.LossInputs(
                old_log_prob=old_log_prob,
                log_prob=log_prob,
                advantages=fields["advantages"],
                mask=fields["response_mask"].bool(),
                loss_agg_mode=self.config.aggregation,
                config=config,
                importance_weights=weights,
                rollout_log_prob=rollout_log_prob,
                counts=counts,
                row_weights=row_weights,
            )
            loss, loss_metrics = formula(inputs)
        else:
            arguments: dict[str, Any] = {
                **fields,
                "old_log_prob": old_log_prob,
                "rollout_log_prob": rollout_log_prob,
                "log_prob": log_prob,
                "loss_agg_mode": self.config.aggregation,
                "config": config,
                "rollout_is_weights": weights,
            }
            loss, loss_metrics = algos.call_policy_loss(name, arguments, counts, row_weights)
        metrics: dict[str, Any] = {"actor/pg_loss": loss / world_size()}
        # A plain number is the micro-batch's mean, as losses written for verl return it.
        share = token_share(fields["response_mask"], counts)
        own = keep_own(loss_metrics, StepNames(), f"what the policy loss {name} measures")
        for metric, value in own.items():
            metrics[metric] = value if isinstance(value, Tensor) else value * share
        return loss, metrics

    @property
    def learns_beside(self) -> bool:
        """Returns whether features bring rows that every mini-batch learns."""
        return bool(self.further_rows)

    def _add_further_rows(self, sums: MetricSums, info: dict[str, Any], mini: MiniBatch) -> None:
        """Adds the gradient of the rows that features bring, and their losses to the metrics."""
        ranks = world_size()
        sequence_ranks = self.settings.sequence_ranks
        share = rank() // sequence_ranks
        update = (int(info.get("global_steps", 1)) - 1) * mini.updates + mini.number
        limits = self.fitting_limits or self.config.micro_batching
        for source in self.further_rows:
            data = source.batch(update, share, ranks // sequence_ranks)
            counts = self._count(data)
            for _, micro, inputs in iter_micro_batches(data, self.settings, limits):
                mask = loss_fields(micro, self.settings.device)["response_mask"]
                log_prob, *_ = self.micro_forward(micro, inputs, "none")
                loss = source.loss(log_prob, mask, counts)
                (source.coef * loss).backward()
                sums.add({source.metric: loss.detach() / ranks}, mini.weight)

    def _weigh_by_own_log_probs(
        self, fields: LossFields, counts: GlobalBatchInfo
    ) -> dict[str, Tensor]:
        """Adds the field `rollout_is_weights`, of the policy's own log-probs, if it is asked for.

        Returns: the metrics of the weights that are means over tokens, this micro-batch's shares of
            them.
        """
        correction = self.correction
        if not correction.weighs_alone:
            return {}
        mask = fields["response_mask"]
        fields["rollout_is_weights"], weight_metrics = algos.compute_rollout_correction_weights(
            fields["old_log_probs"] - fields["rollout_log_probs"],
            mask,
            correction.rollout_is,
            correction.rollout_is_threshold,
        )
        share = token_share(mask, counts)
        return {f"rollout_corr/{name}": weight_metrics[name] * share for name in WEIGHT_MEANS}


def token_share(mask: Tensor, counts: GlobalBatchInfo) -> Tensor:
    """Returns a micro-batch's part of the mini-batch's sampled tokens, 0-dim; mask (rows, R)."""
    return algos.token_fraction(torch.ones_like(mask, dtype=torch.float32), mask, counts)


def policy_loss_config(
    config: ActorConfig, correction: RolloutCorrectionConfig, counts: GlobalBatchInfo
) -> RunLossConfig:
    """Makes a policy loss's `config`: the actor's settings, the correction's, and the counts.

    As in verl's both bounds of the clip range are numbers: clip_ratio where they are not set.
    """
    settings = {setting.name: config[setting.name] for setting in fields_of(ActorConfig)}
    settings["loss_agg_mode"] = config.aggregation
    for bound in ("clip_ratio_low", "clip_ratio_high"):
        if settings[bound] is None:
            settings[bound] = config.clip_ratio
    return RunLossConfig(**settings, rollout_correction=correction, global_batch_info=counts)


def mean_observation_loss(log_prob: Tensor, observation_mask: Tensor, tokens: int) -> Tensor:
    """Returns the loss of predicting observations, of which a mini-batch has so many tokens.

    Tokens that are never sampled, which no policy can predict, add nothing.

    Args:
        log_prob, observation_mask: (rows, response_len).
    """
    observed = observation_mask.bool() & (log_prob > BANNED / 2)
    return -torch.where(observed, log_prob, 0).sum() / max(tokens, 1)
