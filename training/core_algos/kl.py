"""The KL to a reference policy, estimated per token, and the controllers of its coefficient.

Invariant: estimates are pure; only a controller has a state, the coefficient.
"""

import torch
from torch import Tensor

from data.names import unknown_name
from training.core_algos.kl_settings import KLControlSettings

# A log-ratio is clamped to it, because exp(20) is finite in every dtype that a loss is computed in.
MAX_LOG_RATIO = 20.0


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio**2


def _k3(log_ratio: Tensor) -> Tensor:
    reverse = (-log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (reverse.exp() - reverse - 1).clamp(-10.0, 10.0)


# What makes an estimate of log pi - log pi_ref, by verl's two names for each.
KL_KINDS = {
    "kl": torch.positive,
    "abs": torch.abs,
    "mse": _k2,
    "low_var_kl": _k3,
    "k1": torch.positive,
    "k2": _k2,
    "k3": _k3,
}


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Estimates KL(policy || reference) per token from sampled tokens.

    See http://joschu.net/blog/kl-approx.html.

    Args:
        logprob, ref_logprob: any shape, nats.
        kl_penalty: kl|k1: log-ratio; abs: its magnitude; mse|k2: half its square; low_var_kl|k3:
            r - 1 - log r with r = ref / policy, log r clamped to +-20 and the result to +-10. A `+`
            at the end keeps the value but takes the gradient of k2, whose expectation is the KL's
            true gradient.
    Returns: the inputs' shape, nats.
    Raises:
        ValueError: the kind is unknown.
    """
    kind = kl_penalty.removesuffix("+")
    if kind not in KL_KINDS:
        allowed = [*KL_KINDS, *(f"{name}+" for name in KL_KINDS)]
        raise unknown_name("kl_penalty", kl_penalty, allowed)
    log_ratio = logprob - ref_logprob
    estimate = KL_KINDS[kind](log_ratio)
    if not kl_penalty.endswith("+"):
        return estimate
    k2 = _k2(log_ratio)
    return estimate.detach() + k2 - k2.detach()


class AdaptiveKLController:
    """Moves the KL coefficient so that the KL approaches a target (arXiv:1909.08593, section 2.2).

    Attributes:
        value: the coefficient.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        self.value = init_kl_coef
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Takes one step of control after `n_steps` samples whose mean KL was `current_kl` nats."""
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


class FixedKLController:
    """Keeps the KL coefficient as it is.

    Attributes:
        value: the coefficient.
    """

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Leaves the coefficient alone; there so that the two controllers are called alike."""


def get_kl_controller(kl_ctrl: KLControlSettings) -> AdaptiveKLController | FixedKLController:
    """Makes the controller that `algorithm.kl_ctrl` describes: type fixed or adaptive."""
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
