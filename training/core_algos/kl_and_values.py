"""The maths of PPO and its relatives: advantages, policy and value losses, KL, and how token losses become one number.

Invariants: every function is pure; every denominator is an explicit argument, so that a loss does not depend on how a
mini-batch was split into micro-batches or over ranks; values, log-probs and advantages outside the mask change nothing.

Layout of a row with two turns and the environment's reply between them:

    responses     = A0 A0 E0 E0 A1 A1 pad      tokens
    response_mask =  1  1  0  0  1  1  0       1 on what the policy sampled; values and returns step across holes (E0)
"""

from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypedDict, Unpack, get_args

import torch
from torch import Tensor

from data.names import unknown_name
from training.batch import torch_functional as F

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


LOSS_AGG_MODES: tuple[str, ...] = get_args(LossAggMode)


KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


MAX_LOG_RATIO = 20.0  # exp(20) is finite in every dtype that a loss is computed in


class GlobalBatchInfo(TypedDict, total=False):
    """Counts over the whole mini-batch, all micro-batches and ranks together: the denominators of `agg_loss`."""

    dp_size: int  # data-parallel ranks whose gradients are averaged
    batch_num_tokens: int | Tensor | None  # tokens with mask 1
    global_batch_size: int | Tensor | None  # sequences with any such token
    loss_scale_factor: float | None  # tokens, for seq-mean-token-sum-norm


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: LossAggMode,
    dp_size: int = 1,
    batch_num_tokens: int | Tensor | None = None,
    global_batch_size: int | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Turns token losses into a scalar, times dp_size because ranks average their gradients.

    Args:
        loss_mat, loss_mask: (batch, response_len).
        loss_agg_mode:
            token-mean: sum over tokens / batch_num_tokens.
            token-sum: sum over tokens.
            seq-mean-token-sum, seq-mean-token-mean: each sequence's sum or mean, summed / global_batch_size.
            seq-mean-token-sum-norm: seq-mean-token-sum / loss_scale_factor (default: response_len of this very tensor).
        batch_num_tokens, global_batch_size: tokens, and sequences with any token, of the whole mini-batch over all
            ranks; by default those in `loss_mask`. With them, the losses of micro-batches sum to the mini-batch's.
    Returns: 0-dim; 0 with a gradient path where nothing is masked in.
    Raises: ValueError for an unknown mode, or when dp_size > 1 and the count that the mode divides by is missing.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise unknown_name("loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES)
    mask = loss_mask.bool()
    masked = torch.where(mask, loss_mat, 0)
    if loss_agg_mode == "token-sum":
        return masked.sum() * dp_size
    if loss_agg_mode == "token-mean":
        return masked.sum() / _denominator("batch_num_tokens", batch_num_tokens, dp_size, mask) * dp_size
    sequences = _denominator("global_batch_size", global_batch_size, dp_size, mask.any(-1))
    if loss_agg_mode == "seq-mean-token-mean":
        return (masked.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / sequences * dp_size
    scale = 1.0
    if loss_agg_mode == "seq-mean-token-sum-norm":
        scale = loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor
    return masked.sum() / sequences / scale * dp_size


def _denominator(name: str, count: int | Tensor | None, dp_size: int, counted: Tensor) -> Tensor:
    if count is None and dp_size > 1:
        raise ValueError(f"dp_size={dp_size} needs {name}, the count over all ranks: a rank cannot know it by itself")
    return (counted.sum() if count is None else torch.as_tensor(count)).clamp(min=1)


def _token_fraction(per_token: Tensor, mask: Tensor, counts: Mapping[str, Any]) -> Tensor:
    """Detached share or mean over tokens; with global counts, micro-batches and ranks add up to the mini-batch's."""
    local_counts = {**counts, "dp_size": 1}
    return agg_loss(per_token.detach().float(), mask, "token-mean", **local_counts)


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: LossAggMode = "token-mean",
    **counts: Unpack[GlobalBatchInfo],
) -> tuple[Tensor, Tensor]:
    """Half the squared error, the larger of that of the prediction and of the prediction kept near the old value.

    Args:
        vpreds, returns, values, response_mask: (batch, response_len); `values` are the predictions before the update.
        cliprange_value: how far, in units of value, a prediction may move from `values` before its gradient stops.
        counts: the denominators of `agg_loss`.
    Returns: loss and detached fraction of tokens where the clipped error was the larger, both 0-dim.
    """
    vpreds = torch.where(response_mask.bool(), vpreds, 0)
    kept_near = F.clip_by_value(vpreds, values - cliprange_value, values + cliprange_value)
    error, clipped_error = (vpreds - returns) ** 2, (kept_near - returns) ** 2
    loss = 0.5 * agg_loss(torch.maximum(error, clipped_error), response_mask, loss_agg_mode, **counts)
    return loss, _token_fraction(clipped_error > error, response_mask, counts)


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from sampled tokens (http://joschu.net/blog/kl-approx.html).

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
    k2 = 0.5 * log_ratio**2
    if kind in ("kl", "k1"):
        estimate = log_ratio
    elif kind == "abs":
        estimate = log_ratio.abs()
    elif kind in ("mse", "k2"):
        estimate = k2
    else:
        reverse = (-log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        estimate = (reverse.exp() - reverse - 1).clamp(-10.0, 10.0)
    return estimate.detach() + k2 - k2.detach() if kl_penalty.endswith("+") else estimate


class AdaptiveKLController:
    """Moves the KL coefficient so that the KL approaches a target (arXiv:1909.08593, section 2.2)."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        if target_kl <= 0 or horizon <= 0:
            raise ValueError(f"kl_ctrl needs target_kl > 0 and horizon > 0; given {target_kl} and {horizon}")
        self.value = init_kl_coef
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """One step of control after `n_steps` samples whose mean KL was `current_kl` nats."""
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


class FixedKLController:
    """A KL coefficient that stays."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Does nothing; there so that the two controllers are called alike."""


class KLControlConfig(Protocol):
    """`algorithm.kl_ctrl`."""

    @property
    def type(self) -> str: ...
    @property
    def kl_coef(self) -> float: ...
    @property
    def horizon(self) -> float: ...
    @property
    def target_kl(self) -> float: ...


def get_kl_controller(kl_ctrl: KLControlConfig) -> AdaptiveKLController | FixedKLController:
    """The controller that `algorithm.kl_ctrl` describes: type fixed or adaptive."""
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise unknown_name("algorithm.kl_ctrl.type", kl_ctrl.type, ["fixed", "adaptive"])
