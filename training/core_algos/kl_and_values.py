"""The KL to a reference policy, the control of its coefficient, and the critic's loss.

Invariant: losses and estimates are pure, and masked tokens change nothing; only a controller has a state, the
coefficient.
"""

from typing import Unpack

import torch
from torch import Tensor

from data.names import unknown_name
from training.batch.torch_functional import clip_by_value
from training.config.algorithm_settings import KLControlConfig, LossAggMode
from training.core_algos.aggregation import GlobalBatchInfo, agg_loss, token_fraction

# A log-ratio is clamped to it, because exp(20) is finite in every dtype that a loss is computed in.
MAX_LOG_RATIO = 20.0


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio**2


def _k3(log_ratio: Tensor) -> Tensor:
    reverse = (-log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (reverse.exp() - reverse - 1).clamp(-10.0, 10.0)


KL_KINDS = {"kl": torch.positive, "abs": torch.abs, "mse": _k2, "low_var_kl": _k3}
KL_KINDS |= {"k1": torch.positive, "k2": _k2, "k3": _k3}


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: LossAggMode = "token-mean",
    **counts: Unpack[GlobalBatchInfo],
) -> tuple[Tensor, Tensor]:
    """Takes half the squared error of the prediction, or of the prediction kept near the old value if that is larger.

    Args:
        vpreds, returns, values, response_mask: (batch, response_len); `values` are the predictions before the update.
        cliprange_value: how far, in units of value, a prediction may move from `values` before its gradient stops.
        counts: the denominators of `agg_loss`.
    Returns: loss and detached fraction of tokens where the clipped error was the larger, both 0-dim.
    """
    vpreds = torch.where(response_mask.bool(), vpreds, 0)
    kept_near = clip_by_value(vpreds, values - cliprange_value, values + cliprange_value)
    error, clipped_error = (vpreds - returns) ** 2, (kept_near - returns) ** 2
    loss = 0.5 * agg_loss(torch.maximum(error, clipped_error), response_mask, loss_agg_mode, **counts)
    return loss, token_fraction(clipped_error > error, response_mask, counts)


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Estimates KL(policy || reference) per token from sampled tokens (http://joschu.net/blog/kl-approx.html).

    Args:
        logprob, ref_logprob: any shape, nats.
        kl_penalty: kl|k1: log-ratio; abs: its magnitude; mse|k2: half its square; low_var_kl|k3: r - 1 - log r with
            r = ref / policy, log r clamped to +-20 and the result to +-10. A `+` at the end keeps the value but takes
            the gradient of k2, whose expectation is the KL's true gradient.
    """
    kind = kl_penalty.removesuffix("+")
    if kind not in KL_KINDS:
        raise unknown_name("kl_penalty", kl_penalty, [*KL_KINDS, *(f"{name}+" for name in KL_KINDS)])
    log_ratio = logprob - ref_logprob
    estimate, k2 = KL_KINDS[kind](log_ratio), _k2(log_ratio)
    return estimate.detach() + k2 - k2.detach() if kl_penalty.endswith("+") else estimate


class AdaptiveKLController:
    """Moves the KL coefficient so that the KL approaches a target (arXiv:1909.08593, section 2.2)."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        if target_kl <= 0 or horizon <= 0:
            raise ValueError(f"kl_ctrl needs target_kl > 0 and horizon > 0; given {target_kl} and {horizon}")
        self.value, self.target, self.horizon = init_kl_coef, target_kl, horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Takes one step of control after `n_steps` samples whose mean KL was `current_kl` nats."""
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


class FixedKLController:
    """Keeps the KL coefficient as it is."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Does nothing; there so that the two controllers are called alike."""


def get_kl_controller(kl_ctrl: KLControlConfig) -> AdaptiveKLController | FixedKLController:
    """Makes the controller that `algorithm.kl_ctrl` describes: type fixed or adaptive."""
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise unknown_name("algorithm.kl_ctrl.type", kl_ctrl.type, ["fixed", "adaptive"])
