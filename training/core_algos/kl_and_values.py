"""How token losses become one number; the KL to a reference policy and its coefficient; the critic's loss.

Every denominator is an explicit argument, so that with the counts of the whole mini-batch a loss does not depend on how
that was split into micro-batches or over ranks. Beside them stands policy filtration (PF-PPO, arXiv:2409.06957), which
trains more often on responses whose reward is sure.

Invariant: losses and estimates are pure, and masked tokens change nothing; only a controller has a state, the
coefficient.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypedDict, Unpack, get_args

import torch
from torch import Tensor

from data.protocol import DataProto
from data.texts import registered, unknown_name
from training.batch.batching import EpisodeRows, real_rows
from training.batch.torch_functional import clip_by_value
from training.config.algorithm_settings import KLControlConfig, LossAggMode

LOSS_AGG_MODES: tuple[str, ...] = get_args(LossAggMode)


class GlobalBatchInfo(TypedDict, total=False):
    """Counts the whole mini-batch, all micro-batches and ranks together: the denominators of `agg_loss`.

    Attributes:
        dp_size: data-parallel ranks whose gradients are averaged.
        batch_num_tokens: tokens with mask 1.
        global_batch_size: sequences with any such token; one of several rows is one.
        loss_scale_factor: tokens, for seq-mean-token-sum-norm.
    """

    dp_size: int
    batch_num_tokens: int | Tensor | None
    global_batch_size: float | Tensor | None
    loss_scale_factor: float | None


# The counts of the mini-batch whose loss is being computed, for losses that hand none on, and its rows' weights.
_RUNNING: ContextVar[tuple[GlobalBatchInfo, Tensor | None] | None] = ContextVar(
    "running mini-batch", default=None
)


@contextmanager
def denominators(counts: GlobalBatchInfo, row_weights: Tensor | None = None) -> Iterator[None]:
    """Has every `agg_loss` inside that is given no counts divide by these.

    Args:
        row_weights: (batch,) the share of its episode's sampled tokens that each row has; a mean over a row's tokens
            then counts as much. None: 1 each. `global_batch_size` counts the same shares.
    """
    before = _RUNNING.set((counts, row_weights))
    try:
        yield
    finally:
        _RUNNING.reset(before)


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: LossAggMode,
    dp_size: int = 1,
    batch_num_tokens: int | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
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
            ranks. With them, the losses of micro-batches sum to the mini-batch's. A loss that an update calls, and
            that gives neither them nor dp_size, gets those of the update; elsewhere they default to `loss_mask`'s.
    Returns: 0-dim; 0 with a gradient path where nothing is masked in.
    Raises: ValueError for an unknown mode, or when dp_size > 1 and the count that the mode divides by is missing.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise unknown_name("loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES)
    running, row_weights = _RUNNING.get() or (None, None)
    if running and dp_size == 1 and batch_num_tokens is None and global_batch_size is None:
        dp_size, batch_num_tokens = running["dp_size"], running["batch_num_tokens"]
        global_batch_size, loss_scale_factor = (
            running["global_batch_size"],
            running["loss_scale_factor"],
        )
    mask = loss_mask.bool()
    masked = torch.where(mask, loss_mat, 0)
    if loss_agg_mode == "token-sum":
        return masked.sum() * dp_size
    if loss_agg_mode == "token-mean":
        return (
            masked.sum()
            / _denominator("batch_num_tokens", batch_num_tokens, dp_size, mask)
            * dp_size
        )
    sequences = _denominator("global_batch_size", global_batch_size, dp_size, mask.any(-1))
    if loss_agg_mode == "seq-mean-token-mean":
        means = masked.sum(-1) / mask.sum(-1).clamp(min=1)
        return (means if row_weights is None else means * row_weights).sum() / sequences * dp_size
    norm = loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor
    scale = norm if loss_agg_mode == "seq-mean-token-sum-norm" else 1.0
    return masked.sum() / sequences / scale * dp_size


def _denominator(name: str, count: float | Tensor | None, dp_size: int, counted: Tensor) -> Tensor:
    if count is None and dp_size > 1:
        raise ValueError(
            f"dp_size={dp_size} needs {name}, the count over all ranks: a rank cannot know it by itself"
        )
    total = counted.count_nonzero() if count is None else torch.as_tensor(count)
    # A mini-batch may have a part of an episode.
    return torch.where(total > 0, total, 1)


def token_fraction(per_token: Tensor, mask: Tensor, counts: Mapping[str, Any]) -> Tensor:
    """Averages a number over tokens, detached; with global counts, micro-batches and ranks add up to the mini-batch's.

    Args:
        per_token, mask: (batch, response_len); of a condition the mean is the share of tokens that meet it.
        counts: the mini-batch's, as of `GlobalBatchInfo`.
    """
    running, _ = _RUNNING.get() or ({}, None)
    known = {
        name: count
        for given in (running, counts)
        for name, count in given.items()
        if count is not None
    }
    tokens = _denominator("batch_num_tokens", known.get("batch_num_tokens"), 1, mask.bool())
    return torch.where(mask.bool(), per_token.detach().float(), 0).sum() / tokens


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
    loss = 0.5 * agg_loss(
        torch.maximum(error, clipped_error), response_mask, loss_agg_mode, **counts
    )
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
        raise unknown_name(
            "kl_penalty", kl_penalty, [*KL_KINDS, *(f"{name}+" for name in KL_KINDS)]
        )
    log_ratio = logprob - ref_logprob
    estimate, k2 = KL_KINDS[kind](log_ratio), _k2(log_ratio)
    return estimate.detach() + k2 - k2.detach() if kl_penalty.endswith("+") else estimate


class AdaptiveKLController:
    """Moves the KL coefficient so that the KL approaches a target (arXiv:1909.08593, section 2.2)."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
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
    return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)


def compute_pf_ppo_reweight_data(
    data: DataProto, reweight_method: str = "pow", weight_pow: float = 2.0, seed: int | None = None
) -> DataProto:
    """Draws as many rows as there are, with replacement, by the scores of their episodes.

    Args:
        data: has token_level_scores (B, R). Neither dummy rows nor rows without a sampled token are drawn.
        reweight_method: pow: |score|^weight_pow; max_min: the best and the worst alone; max_random: the best four times
            as often as others.
        seed: of the draws; None: torch's generator draws.
    """
    episodes, real = EpisodeRows(data), real_rows(data) & data.batch["response_mask"].bool().any(1)
    scores = episodes.of_rows(episodes.totals(data.batch["token_level_scores"]).float().double())
    best, worst = scores == scores[real].max(), scores == scores[real].min()
    kinds = {
        "pow": scores.abs() ** weight_pow,
        "max_min": best | worst,
        "max_random": torch.where(best, 0.4, 0.1),
    }
    weights = torch.where(
        real, registered(kinds, "reweight_method", reweight_method).double() + 1e-8, 0
    )
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return data.select_idxs(
        torch.multinomial(weights, len(data), replacement=True, generator=generator)
    )
