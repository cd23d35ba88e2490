"""Policy losses: PPO's clipped surrogate and its relatives.

Each formula takes `LossInputs`, the tensors of a micro-batch; the results and the metrics stand at
the top of loss_inputs.py. Its name may also be called with verl's arguments, which stand at the top
of verl_form.py; there the formula itself is `.formula`. In the docstrings

    A      the advantage of a token
    r      the ratio of a token, pi / pi_old
    low, high   how far r may be below and above 1: config.clip_ratio_low and clip_ratio_high, or
           config.clip_ratio where they are None

Invariant: a loss is pure and returns the micro-batch's share of the mini-batch's loss.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from training.core_algos.aggregation import LossAggMode
from training.core_algos.correction_settings import RolloutCorrectionSettings
from training.core_algos.loss_inputs import Loss, LossInputs
from training.core_algos.registry import register_policy_loss
from training.core_algos.rollout_correction import correct_as
from training.core_algos.verl_form import of_formula, policy_loss


@policy_loss("vanilla")
def compute_policy_loss_vanilla(inputs: LossInputs) -> Loss:
    """Computes PPO's clipped loss, max(-A r, -A clip(r, 1 - low, 1 + high)).

    PPO (arXiv:1707.06347, eq. 7), with a loss of at most c |A| where A < 0 (dual clip,
    arXiv:1912.09729, eq. 5); c is config.clip_ratio_c.
    """
    advantages = inputs.advantages
    low, high = inputs.clip_range
    bound = inputs.config.clip_ratio_c
    ratio = inputs.log_ratio.exp()

    # max(-A r, -A clip(r)) is -A min(r, 1 + high) where A >= 0; else -A max(r, 1 - low), which c
    # bounds.
    is_negative = advantages < 0
    clipped_ratio = torch.where(is_negative, ratio.clamp(1 - low, bound), ratio.clamp(max=1 + high))
    clipped_lower = is_negative & (ratio > bound)
    clipped = (clipped_ratio != ratio) & ~clipped_lower & (advantages != 0)
    return inputs.aggregate(-advantages * clipped_ratio, clipped, clipped_lower)


@policy_loss("gspo", loss_agg_mode="seq-mean-token-mean")
def compute_policy_loss_gspo(inputs: LossInputs) -> Loss:
    """Clips the sequence's ratio, s = (pi / pi_old)^(1 / length), with each token's own gradient.

    GSPO-token, max(-A s, -A clip(s, 1 - low, 1 + high)) (arXiv:2507.18071, eq. 13); with advantages
    that are one number a sequence it is GSPO. A sequence is a row.
    """
    advantages = inputs.advantages
    low, high = inputs.clip_range
    log_prob = torch.where(inputs.mask, inputs.log_prob, 0)
    sequence_log_ratio = inputs.row_mean(inputs.log_ratio).detach()  # (batch, 1)
    # The sequence's value, the token's gradient.
    log_ratio = log_prob - log_prob.detach() + sequence_log_ratio
    ratio = log_ratio.clamp(max=10.0).exp()

    loss = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(1 - low, 1 + high)
    return inputs.aggregate(torch.maximum(loss, clipped_loss), clipped_loss > loss)


@policy_loss("geo_mean")
def compute_policy_loss_geo_mean(inputs: LossInputs) -> Loss:
    """Takes the geometric mean of a sequence's token ratios, each clipped in its logarithm.

    GMPO, -A geomean(r) with log r kept within (-low, high) (arXiv:2507.20673). The loss is the mean
    over sequences, with A the mean of its tokens' advantages, whatever `loss_agg_mode` says.
    Importance weights enter by their geometric mean, too.
    """
    advantages = inputs.advantages
    low, high = inputs.clip_range
    log_ratio = inputs.log_ratio
    bounded = log_ratio.clamp(-low, high)
    # As in PPO, a ratio is clipped on the side alone that its advantage drives it to.
    clipped_log_ratio = torch.where(
        advantages > 0,
        torch.minimum(log_ratio, bounded),
        torch.maximum(log_ratio, bounded),
    )
    row_advantage = inputs.row_mean(advantages)  # (batch, 1)
    row_log_ratio = inputs.row_mean(torch.where(advantages == 0, 0, clipped_log_ratio))
    row_loss = -row_advantage * row_log_ratio.exp()  # (batch, 1)
    if inputs.importance_weights is not None:
        log_weights = (inputs.importance_weights + 1e-10).log()
        row_loss = row_loss * inputs.row_mean(log_weights).exp()

    is_outside = bounded != log_ratio
    # The weights are in the rows' losses already.
    by_sequence = replace(inputs, importance_weights=None, loss_agg_mode="seq-mean-token-mean")
    return by_sequence.aggregate(
        row_loss.expand_as(clipped_log_ratio),
        clipped=is_outside & (advantages > 0),
        clipped_lower=is_outside & (advantages < 0),
    )


@policy_loss("gpg")
def compute_policy_loss_gpg(inputs: LossInputs) -> Loss:
    """Computes the plain policy gradient, -A log pi, without ratio or clip.

    GPG (arXiv:2504.02546).
    """
    return inputs.aggregate(-inputs.advantages * inputs.log_prob)


def _sampled_policy_gradient(inputs: LossInputs) -> Loss:
    """Computes gpg's loss with the engine's log-probs for the old ones."""
    assert inputs.rollout_log_prob is not None
    by_engine = replace(inputs, old_log_prob=inputs.rollout_log_prob)
    return compute_policy_loss_gpg.formula(by_engine)


@register_policy_loss("reinforce")
@of_formula(_sampled_policy_gradient)
def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: LossAggMode = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """Computes the plain policy gradient of what the engine sampled, -w A log pi.

    w are `rollout_is_weights`. It is gpg's loss; its actor/ppo_kl is to the engine's log-probs.
    """
    return compute_policy_loss_gpg(
        rollout_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
        rollout_is_weights=rollout_is_weights,
    )


@policy_loss("cispo")
def compute_policy_loss_cispo(inputs: LossInputs) -> Loss:
    """Weighs the policy gradient with the clipped ratio, which has no gradient.

    CISPO, -A clip(r, 1 - low, 1 + high) log pi (arXiv:2506.13585, eq. 4).
    """
    low, high = inputs.clip_range
    ratio = inputs.log_ratio.detach().exp()
    clipped_ratio = ratio.clamp(1 - low, 1 + high)
    token_losses = -inputs.advantages * clipped_ratio * inputs.log_prob
    return inputs.aggregate(token_losses, clipped_ratio != ratio)


@policy_loss("sapo", loss_agg_mode="seq-mean-token-mean")
def compute_policy_loss_sapo(inputs: LossInputs) -> Loss:
    """Gates the ratio softly in the place of a clip, -A sigmoid(tau (r - 1)) 4 / tau.

    SAPO (arXiv:2511.20347, eq. 5); tau is config.tau_pos where A > 0, else config.tau_neg. The loss
    is a mean over sequences' means, whatever `loss_agg_mode` says.
    """
    advantages = inputs.advantages
    tau = torch.where(advantages > 0, inputs.config.tau_pos, inputs.config.tau_neg)
    ratio = inputs.log_ratio.exp()
    gate = torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
    by_sequence = replace(inputs, loss_agg_mode="seq-mean-token-mean")
    return by_sequence.aggregate(-advantages * gate, clipped=torch.zeros_like(inputs.mask))


@policy_loss("dppo_tv")
def compute_policy_loss_dppo_tv(inputs: LossInputs) -> Loss:
    """Drops tokens whose probability went further than a bound in the advantage's direction.

    DPPO (arXiv:2602.04879). The bounds `low` and `high` are of |pi - pi_old|, the total variation
    of taking this token or another. What stays is the policy gradient, weighted with the ratio up
    to config.clip_ratio_c.
    """
    low, high = inputs.clip_range
    moved = inputs.log_prob.detach().exp() - inputs.old_log_prob.exp()
    kept = torch.where(inputs.advantages > 0, moved <= high, moved >= -low)
    return _loss_of_kept_tokens(inputs, kept)


@policy_loss("dppo_kl")
def compute_policy_loss_dppo_kl(inputs: LossInputs) -> Loss:
    """Computes `dppo_tv` with the bounds on a KL instead of a total variation (arXiv:2602.04879).

    It is the KL, old against new, of taking this token or another:
    p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)).
    """
    low, high = inputs.clip_range
    new = inputs.log_prob.detach().exp()
    old = inputs.old_log_prob.exp()
    kl_of_token = -old * inputs.log_ratio.detach()
    kl_of_others = (1 - old) * ((1 - old + 1e-8) / (1 - new + 1e-8)).log()
    kl = kl_of_token + kl_of_others
    kept_going_up = (kl <= high) | (new <= old)
    kept_going_down = (kl <= low) | (new >= old)
    kept = torch.where(inputs.advantages > 0, kept_going_up, kept_going_down)
    return _loss_of_kept_tokens(inputs, kept)


def _loss_of_kept_tokens(inputs: LossInputs, kept: Tensor) -> Loss:
    """Computes the policy gradient of the kept tokens, weighted with the bounded ratio."""
    bound = inputs.config.clip_ratio_c
    ratio = inputs.log_ratio.detach().exp()
    token_losses = -inputs.advantages * ratio.clamp(max=bound) * inputs.log_prob
    token_losses = torch.where(kept, token_losses, 0)
    return inputs.aggregate(token_losses, clipped=~kept, clipped_lower=kept & (ratio > bound))


@policy_loss("dro")
def compute_policy_loss_dro(inputs: LossInputs) -> Loss:
    """Holds the policy near the old one by a square, -A log pi + beta / 2 (log pi / pi_old)^2.

    DRO (arXiv:2405.19107); beta is config.policy_loss.dro_beta, above 0.
    """
    beta = inputs.config.policy_loss.dro_beta
    if beta is None:
        raise ValueError("policy_loss.dro_beta=None: the loss dro needs it, above 0")
    policy_gradient = -inputs.advantages * inputs.log_prob
    return inputs.aggregate(policy_gradient + 0.5 * beta * inputs.log_ratio.square())


@policy_loss("bypass_mode")
def compute_policy_loss_bypass_mode(inputs: LossInputs) -> Loss:
    """Takes the engine's log-probs for the old ones: `old_log_prob` are those of what sampled.

    With config.rollout_correction.loss_type=ppo_clip it is the vanilla loss, whose ratio corrects
    for the engine by itself; with reinforce the policy gradient, with importance weights
    pi / pi_engine where `rollout_is` asks for them. `rollout_rs` masks tokens in both.
    Importance weights that it is given are not read: they are made here. The metrics have those of
    `compute_rollout_correction_and_rejection_mask` beside the loss's.
    """
    correction = _correction_of(inputs.config)
    with torch.no_grad():
        weights, mask, correction_metrics = correct_as(
            correction, inputs.log_prob.detach(), inputs.old_log_prob, inputs.mask
        )
    if correction.loss_type == "ppo_clip":
        kept = replace(inputs, mask=mask.bool(), importance_weights=None)
        loss, metrics = compute_policy_loss_vanilla.formula(kept)
    else:
        kept = replace(inputs, mask=mask.bool(), importance_weights=weights)
        loss, metrics = compute_policy_loss_gpg.formula(kept)
    return loss, correction_metrics | metrics


def _correction_of(config: Any) -> RolloutCorrectionSettings:
    """Reads how to correct: as verl has it, among the loss's own settings, or beside them."""
    correction = config.policy_loss.get("rollout_correction")
    if correction is None:
        correction = config.rollout_correction
    if isinstance(correction, Mapping):
        return RolloutCorrectionSettings(**correction)
    return correction
