"""Policy losses that treat the tokens of large covariance apart, to keep the policy's entropy.

The covariance of a token is (A - mean A)(log pi - mean log pi), with means over the micro-batch: a
likely token with a large advantage costs entropy (arXiv:2505.22617). As means and shares are of the
micro-batch, gradients depend on how a mini-batch is cut, as verl's do.

Invariant: what chooses tokens has no gradient. Arguments and results of a loss stand at the top of
loss_inputs.py.
"""

import torch
from torch import Tensor

from training.core_algos.loss_draws import draw_order
from training.core_algos.loss_inputs import Loss, LossInputs
from training.core_algos.masked_ops import masked_mean
from training.core_algos.verl_form import policy_loss


@policy_loss("clip_cov")
def compute_policy_loss_clip_cov(inputs: LossInputs) -> Loss:
    """Stops the gradient of a few tokens that would cost most entropy: Clip-Cov.

    Of the tokens whose covariance is between policy_loss.clip_cov_lb and clip_cov_ub, and that PPO
    does not clip, a share of clip_cov_ratio of all tokens is drawn, at least one
    (arXiv:2505.22617, eq. 11 and 12). All others have PPO's loss.
    """
    advantages = inputs.advantages
    low, high = inputs.clip_range
    ratio = inputs.log_ratio.exp()
    loss = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(1 - low, 1 + high)
    stopped = _draw_stopped_tokens(inputs, is_unclipped=clipped_loss <= loss)
    token_losses = torch.where(stopped, 0, torch.maximum(loss, clipped_loss))
    return inputs.aggregate(token_losses, stopped)


@policy_loss("kl_cov")
def compute_policy_loss_kl_cov(inputs: LossInputs) -> Loss:
    """Holds the tokens of the largest covariance near the old policy: KL-Cov.

    -A r + ppo_kl_coef |log pi / pi_old|, the latter on policy_loss.kl_cov_ratio of the
    micro-batch's tokens, at least one (arXiv:2505.22617, eq. 13 and 14). actor/ppo_kl is the mean
    of |log pi / pi_old|.
    """
    settings = inputs.config.policy_loss
    held = _tokens_of_largest_covariance(inputs, settings.kl_cov_ratio)
    distance = inputs.log_ratio.abs()
    policy_gradient = -inputs.advantages * inputs.log_ratio.exp()
    loss, metrics = inputs.aggregate(policy_gradient + settings.ppo_kl_coef * distance * held)
    metrics["actor/ppo_kl"] = inputs.fraction(distance)
    return loss, metrics


@torch.no_grad()
def _draw_stopped_tokens(inputs: LossInputs, is_unclipped: Tensor) -> Tensor:
    """Draws the tokens of Clip-Cov: (batch, response_len) bool."""
    settings = inputs.config.policy_loss
    covariance = _covariance(inputs)
    is_between = (covariance > settings.clip_cov_lb) & (covariance < settings.clip_cov_ub)
    candidates = (inputs.mask & is_between & is_unclipped).flatten().nonzero().flatten()
    order = draw_order(len(candidates), candidates.device)
    drawn = order[: _count_share(inputs, settings.clip_cov_ratio)]
    return _at_places(inputs, candidates[drawn])


@torch.no_grad()
def _tokens_of_largest_covariance(inputs: LossInputs, ratio: float) -> Tensor:
    """Takes the tokens of KL-Cov, a share of `ratio`: (batch, response_len) bool."""
    covariance = torch.where(inputs.mask, _covariance(inputs), -torch.inf)
    sampled_tokens = int(inputs.mask.count_nonzero())
    count = min(_count_share(inputs, ratio), sampled_tokens)
    return _at_places(inputs, covariance.flatten().topk(count).indices)


def _covariance(inputs: LossInputs) -> Tensor:
    """Computes how far log-prob and advantage of each token are off their means, multiplied.

    Returns: (batch, response_len), masked tokens too.
    """
    advantage_deviation = inputs.advantages - masked_mean(inputs.advantages, inputs.mask)
    log_prob_deviation = inputs.log_prob - masked_mean(inputs.log_prob, inputs.mask)
    return advantage_deviation * log_prob_deviation


def _count_share(inputs: LossInputs, ratio: float) -> int:
    """Counts `ratio` of the sampled tokens, at least one."""
    return max(int(ratio * int(inputs.mask.count_nonzero())), 1)


def _at_places(inputs: LossInputs, places: Tensor) -> Tensor:
    """Marks places of the flattened micro-batch: (batch, response_len) bool."""
    marks = torch.zeros_like(inputs.mask).flatten()
    return marks.index_fill(0, places, True).view_as(inputs.mask)
