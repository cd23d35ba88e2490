"""Policy losses: PPO's clipped surrogate and its relatives, and the config that they and registered losses are handed.

Invariant: a loss is pure and returns the micro-batch's share of the mini-batch's loss; the log-probs of masked tokens
reach neither the loss nor its gradient. `policy_loss` makes of each a function with verl's arguments,

    (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights) -> (loss, metrics)

    old_log_prob, log_prob, advantages, response_mask: (batch, response_len); log-probs in nats.
    loss_agg_mode: see `agg_loss`.
    config: `PolicyLossConfig` or anything with its fields; None means its defaults.
    rollout_is_weights: (batch, response_len) importance weights that multiply each token's loss, or None.
    metrics: detached, 0-dim: actor/ppo_kl (mean of old - new), actor/pg_clipfrac (the share of tokens whose gradient is
        cut), actor/pg_clipfrac_lower (of those that reach the bound where advantages are negative).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Unpack

import torch
from torch import Tensor

from training.batch.torch_functional import at_least_float32, entropy_from_logits, masked_mean
from training.config import ActorConfig
from training.config.algorithm_settings import LossAggMode, RolloutCorrectionConfig
from training.core_algos import group_advantages, kl_and_values
from training.core_algos.advantages import gae_scan
from training.core_algos.kl_and_values import GlobalBatchInfo, agg_loss, token_fraction
from training.rollout_correction import correct_as

Loss = tuple[Tensor, dict[str, Any]]


class PolicyLossConfig(ActorConfig):
    """Holds what a policy loss may read as `config`: by attribute, or by key as losses written for verl do.

    That is the actor's section, whose `policy_loss` is the loss's own frozen sub-config, and two things more.
    """

    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    # Any, as the tensors in it are not for a config to check.
    global_batch_info: Any = field(default_factory=GlobalBatchInfo)


@dataclass(frozen=True)
class Tokens:
    """Holds what a loss is computed from.

    Attributes:
        mask: (batch, response_len) bool.
        old_log_prob, log_prob: (batch, response_len) as given, masked tokens too.
        weights: (batch, response_len) importance weights, or None.
        counts: as of `agg_loss`.
        chosen: (batch, response_len) bool, tokens that the loss treats otherwise.
        measured: metrics of the whole micro-batch.
    """

    mask: Tensor
    old_log_prob: Tensor
    log_prob: Tensor
    mode: LossAggMode
    config: Any
    weights: Tensor | None
    counts: GlobalBatchInfo
    chosen: Tensor | None = None
    measured: dict[str, float] = field(default_factory=dict)

    @cached_property
    def log_ratio(self) -> Tensor:
        """Is new less old, within +-20; zero and without gradient outside the mask: (batch, response_len)."""
        # Masked before the exponential, so that padding's log-probs reach neither the loss nor its gradient.
        apart = torch.where(self.mask, self.log_prob - self.old_log_prob, 0)
        return apart.clamp(-kl_and_values.MAX_LOG_RATIO, kl_and_values.MAX_LOG_RATIO)

    @property
    def clip_range(self) -> tuple[float, float]:
        """Returns how far a ratio may be below 1, and above."""
        config = self.config
        low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
        return low, config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high

    def row_mean(self, per_token: Tensor) -> Tensor:
        """Averages over each row's sampled tokens: (batch, 1)."""
        lengths = self.mask.sum(-1, keepdim=True).clamp(min=1)
        return torch.where(self.mask, per_token, 0).sum(-1, keepdim=True) / lengths

    def fraction(self, per_token: Tensor) -> Tensor:
        """Averages over the mini-batch's tokens, see `token_fraction`."""
        return token_fraction(per_token, self.mask, self.counts)

    def loss(
        self, token_loss: Tensor, clipped: Tensor | None = None, clipped_lower: Tensor | None = None
    ) -> Loss:
        """Aggregates token losses, times the importance weights; adds the metrics."""
        if self.weights is not None:
            token_loss = token_loss * self.weights
        lower = (
            torch.zeros_like(clipped)
            if clipped is not None and clipped_lower is None
            else clipped_lower
        )
        shares = {"pg_clipfrac": clipped, "ppo_kl": -self.log_ratio, "pg_clipfrac_lower": lower}
        metrics = {
            f"actor/{name}": self.fraction(share)
            for name, share in shares.items()
            if share is not None
        }
        return agg_loss(token_loss, self.mask, self.mode, **self.counts), self.measured | metrics


# What computes each loss, by its name, of tokens and advantages.
LOSS_OF_TOKENS: dict[str, Callable[[Tokens, Tensor], Loss]] = {}


def policy_loss(
    name: str,
    mode: LossAggMode = "token-mean",
    prepare: Callable[[Tokens, Tensor], Tokens] | None = None,
) -> Callable[[Callable[[Tokens, Tensor], Loss]], group_advantages.PolicyLossFn]:
    """Makes a decorator: of a loss of (tokens, advantages) it makes a registered one with verl's arguments.

    Args:
        mode: what loss_agg_mode is by default.
        prepare: chooses, masks or weighs tokens, without a gradient.
    """

    def decorate(compute: Callable[[Tokens, Tensor], Loss]) -> group_advantages.PolicyLossFn:
        def loss(
            old_log_prob: Tensor,
            log_prob: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            loss_agg_mode: LossAggMode = mode,
            config: Any = None,
            rollout_is_weights: Tensor | None = None,
        ) -> Loss:
            config = PolicyLossConfig() if config is None else config
            given = (
                response_mask.bool(),
                old_log_prob,
                log_prob,
                loss_agg_mode,
                config,
                rollout_is_weights,
            )
            tokens = Tokens(*given, config.global_batch_info)
            if prepare is not None:
                with torch.no_grad():
                    tokens = prepare(tokens, advantages)
            return compute(tokens, advantages)

        LOSS_OF_TOKENS[name] = compute
        loss.__name__, loss.__qualname__, loss.__doc__ = (
            compute.__name__,
            compute.__name__,
            compute.__doc__,
        )
        return group_advantages.register_policy_loss(name)(loss)

    return decorate


@policy_loss("vanilla")
def compute_policy_loss_vanilla(tokens: Tokens, advantages: Tensor) -> Loss:
    """Computes PPO's clipped loss (arXiv:1707.06347, eq. 7), at most c * |A| where A < 0 (arXiv:1912.09729, eq. 5).

    Reads config.clip_ratio, clip_ratio_low, clip_ratio_high and clip_ratio_c.
    """
    (low, high), bound = tokens.clip_range, tokens.config.clip_ratio_c
    ratio, negative = tokens.log_ratio.exp(), advantages < 0
    # max(-A r, -A clip(r)) is -A min(r, 1 + high) where A >= 0; else -A max(r, 1 - low), which c bounds.
    kept = torch.where(negative, ratio.clamp(1 - low, bound), ratio.clamp(max=1 + high))
    lower = negative & (ratio > bound)
    return tokens.loss(-advantages * kept, (kept != ratio) & ~lower & (advantages != 0), lower)


@policy_loss("gspo", "seq-mean-token-mean")
def compute_policy_loss_gspo(tokens: Tokens, advantages: Tensor) -> Loss:
    """Clips the sequence's ratio, s = (pi / pi_old)^(1/length), whose gradient each token carries: GSPO-token.

    See arXiv:2507.18071, eq. 13; with advantages that are one number a sequence it is GSPO. A sequence is a row. Reads
    config.clip_ratio, clip_ratio_low and clip_ratio_high.
    """
    low, high = tokens.clip_range
    own = torch.where(tokens.mask, tokens.log_prob, 0)
    ratio = (own - own.detach() + tokens.row_mean(tokens.log_ratio).detach()).clamp(max=10.0).exp()
    loss, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    return tokens.loss(torch.maximum(loss, clipped), clipped > loss)


@policy_loss("geo_mean")
def compute_policy_loss_geo_mean(tokens: Tokens, advantages: Tensor) -> Loss:
    """Takes the geometric mean of a sequence's token ratios, each clipped in its logarithm: GMPO (arXiv:2507.20673).

    The loss is the mean over sequences, -A * geomean(ratio), with A the mean of its tokens' advantages, whatever
    `loss_agg_mode` says. Importance weights enter by their geometric mean, too.
    """
    low, high = tokens.clip_range
    near = tokens.log_ratio.clamp(-low, high)
    kept = torch.where(
        advantages > 0, torch.minimum(tokens.log_ratio, near), torch.maximum(tokens.log_ratio, near)
    )
    loss = (
        -tokens.row_mean(advantages) * tokens.row_mean(torch.where(advantages == 0, 0, kept)).exp()
    )
    if tokens.weights is not None:
        loss = loss * tokens.row_mean((tokens.weights + 1e-10).log()).exp()
    clipped, tokens = (
        near != tokens.log_ratio,
        replace(tokens, weights=None, mode="seq-mean-token-mean"),
    )
    return tokens.loss(loss.expand_as(kept), clipped & (advantages > 0), clipped & (advantages < 0))


@policy_loss("gpg")
def compute_policy_loss_gpg(tokens: Tokens, advantages: Tensor) -> Loss:
    """Is the plain policy gradient, -A log pi, without ratio or clip (arXiv:2504.02546)."""
    return tokens.loss(-advantages * tokens.log_prob)


@group_advantages.register_policy_loss("reinforce")
def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: LossAggMode = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """Is the plain policy gradient of what the engine sampled, -w A log pi; its KL is to the engine's log-probs."""
    given = (
        rollout_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode,
        config,
        rollout_is_weights,
    )
    return compute_policy_loss_gpg(*given)


@policy_loss("cispo")
def compute_policy_loss_cispo(tokens: Tokens, advantages: Tensor) -> Loss:
    """Weighs the policy gradient with the clipped ratio, which has no gradient: CISPO (arXiv:2506.13585, eq. 4).

    Reads config.clip_ratio, clip_ratio_low and clip_ratio_high.
    """
    low, high = tokens.clip_range
    ratio = tokens.log_ratio.detach().exp()
    kept = ratio.clamp(1 - low, 1 + high)
    return tokens.loss(-advantages * kept * tokens.log_prob, kept != ratio)


@policy_loss("sapo", "seq-mean-token-mean")
def compute_policy_loss_sapo(tokens: Tokens, advantages: Tensor) -> Loss:
    """Gates the ratio softly, -A sigmoid(tau (r - 1)) 4 / tau, in the place of a clip: SAPO (arXiv:2511.20347, eq. 5).

    tau is config.tau_pos where A > 0, else tau_neg. The loss is a mean over sequences' means, whatever `loss_agg_mode`
    says.
    """
    tau = torch.where(advantages > 0, tokens.config.tau_pos, tokens.config.tau_neg)
    gate = torch.sigmoid(tau * (tokens.log_ratio.exp() - 1)) * (4 / tau)
    return replace(tokens, mode="seq-mean-token-mean").loss(
        -advantages * gate, torch.zeros_like(tokens.mask)
    )


@policy_loss("dppo_tv")
def compute_policy_loss_dppo_tv(tokens: Tokens, advantages: Tensor) -> Loss:
    """Drops tokens whose probability went further than a bound in the advantage's direction: DPPO (arXiv:2602.04879).

    The bounds, config.clip_ratio_low and clip_ratio_high, are of |pi - pi_old|, the total variation of taking this
    token or another. What stays is the policy gradient, weighted with the ratio up to clip_ratio_c.
    """
    low, high = tokens.clip_range
    moved = tokens.log_prob.detach().exp() - tokens.old_log_prob.exp()
    return _dppo(tokens, advantages, torch.where(advantages > 0, moved <= high, moved >= -low))


@policy_loss("dppo_kl")
def compute_policy_loss_dppo_kl(tokens: Tokens, advantages: Tensor) -> Loss:
    """Is `dppo_tv` with the bounds on the KL of taking this token or another, old against new (arXiv:2602.04879)."""
    low, high = tokens.clip_range
    new, old = tokens.log_prob.detach().exp(), tokens.old_log_prob.exp()
    kl = -old * tokens.log_ratio.detach() + (1 - old) * ((1 - old + 1e-8) / (1 - new + 1e-8)).log()
    up, down = (kl <= high) | (new <= old), (kl <= low) | (new >= old)
    return _dppo(tokens, advantages, torch.where(advantages > 0, up, down))


def _dppo(tokens: Tokens, advantages: Tensor, kept: Tensor) -> Loss:
    ratio, bound = tokens.log_ratio.detach().exp(), tokens.config.clip_ratio_c
    loss = torch.where(kept, -advantages * ratio.clamp(max=bound) * tokens.log_prob, 0)
    return tokens.loss(loss, ~kept, kept & (ratio > bound))


@policy_loss("dro")
def compute_policy_loss_dro(tokens: Tokens, advantages: Tensor) -> Loss:
    """Holds the policy near the old one by a square, -A log pi + beta/2 (log pi/pi_old)^2: DRO (arXiv:2405.19107).

    Reads config.policy_loss.dro_beta, above 0.
    """
    beta = tokens.config.policy_loss.dro_beta
    return tokens.loss(-advantages * tokens.log_prob + 0.5 * beta * tokens.log_ratio.square())


def _choose_clip_cov(tokens: Tokens, advantages: Tensor) -> Tokens:
    (low, high), settings, ratio = (
        tokens.clip_range,
        tokens.config.policy_loss,
        tokens.log_ratio.exp(),
    )
    covariance = _covariance(tokens, advantages)
    between = (covariance > settings.clip_cov_lb) & (covariance < settings.clip_cov_ub)
    unclipped = -advantages * ratio.clamp(1 - low, 1 + high) <= -advantages * ratio
    places = (tokens.mask & between & unclipped).flatten().nonzero().flatten()
    drawn = torch.randperm(len(places), device=places.device)[
        : _share(tokens, settings.clip_cov_ratio)
    ]
    return _with_chosen(tokens, places[drawn])


def _choose_kl_cov(tokens: Tokens, advantages: Tensor) -> Tokens:
    covariance = torch.where(tokens.mask, _covariance(tokens, advantages), -torch.inf).flatten()
    count = min(
        _share(tokens, tokens.config.policy_loss.kl_cov_ratio), int(tokens.mask.count_nonzero())
    )
    return _with_chosen(tokens, covariance.topk(count).indices)


def _with_chosen(tokens: Tokens, places: Tensor) -> Tokens:
    chosen = torch.zeros_like(tokens.mask).flatten().index_fill(0, places, True)
    return replace(tokens, chosen=chosen.view_as(tokens.mask))


def _covariance(tokens: Tokens, advantages: Tensor) -> Tensor:
    """Says how log-prob and advantage vary together in this micro-batch: (batch, response_len)."""
    own, mask = tokens.log_prob, tokens.mask
    return (advantages - masked_mean(advantages, mask)) * (own - masked_mean(own, mask))


@policy_loss("clip_cov", prepare=_choose_clip_cov)
def compute_policy_loss_clip_cov(tokens: Tokens, advantages: Tensor) -> Loss:
    """Stops the gradient of a few tokens that would cost most entropy, drawn among those of large covariance: Clip-Cov.

    The covariance of a token is (A - mean A)(log pi - mean log pi); of those between policy_loss.clip_cov_lb and
    clip_cov_ub and not clipped, clip_cov_ratio of all tokens are drawn, at least one (arXiv:2505.22617, eq. 11 and 12).
    Means and draws are of the micro-batch.
    """
    (low, high), ratio, stopped = tokens.clip_range, tokens.log_ratio.exp(), tokens.chosen
    assert stopped is not None
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    return tokens.loss(torch.where(stopped, 0, loss), stopped)


@policy_loss("kl_cov", prepare=_choose_kl_cov)
def compute_policy_loss_kl_cov(tokens: Tokens, advantages: Tensor) -> Loss:
    """Holds the tokens of the largest covariance near the old policy, by ppo_kl_coef |log pi/pi_old|: KL-Cov.

    They are policy_loss.kl_cov_ratio of the micro-batch's tokens, at least one (arXiv:2505.22617, eq. 13 and 14);
    covariances are those of Clip-Cov. actor/ppo_kl is the mean of |log pi/pi_old|.
    """
    away, coef = tokens.log_ratio.abs(), tokens.config.policy_loss.ppo_kl_coef
    loss, metrics = tokens.loss(-advantages * tokens.log_ratio.exp() + coef * away * tokens.chosen)
    return loss, metrics | {"actor/ppo_kl": tokens.fraction(away)}


def _share(tokens: Tokens, ratio: float) -> int:
    """Counts so large a part of the sampled tokens, one at least."""
    return max(int(ratio * int(tokens.mask.count_nonzero())), 1)


def _correct(tokens: Tokens, advantages: Tensor) -> Tokens:
    correction, log_prob = tokens.config.rollout_correction, tokens.log_prob.detach()
    weights, mask, metrics = correct_as(correction, log_prob, tokens.old_log_prob, tokens.mask)
    weighed = (
        None
        if weights is None or correction.loss_type == "ppo_clip"
        else weights.batch["rollout_is_weights"]
    )
    return replace(tokens, mask=mask, weights=weighed, measured=metrics)


@policy_loss("bypass_mode", prepare=_correct)
def compute_policy_loss_bypass_mode(tokens: Tokens, advantages: Tensor) -> Loss:
    """Takes the engine's log-probs for the old ones: `old_log_prob` are those of what sampled.

    With config.rollout_correction.loss_type=ppo_clip it is the vanilla loss, whose ratio corrects for the engine by
    itself; with reinforce the policy gradient, with importance weights pi/pi_engine where `rollout_is` asks for them.
    `rollout_rs` masks tokens in both.
    """
    clips = tokens.config.rollout_correction.loss_type == "ppo_clip"
    return LOSS_OF_TOKENS["vanilla" if clips else "gpg"](tokens, advantages)


# Older forms that verl's users know and no run here calls, and estimators by other names

compute_grpo_vectorized_outcome_advantage = group_advantages.compute_grpo_outcome_advantage
compute_rloo_vectorized_outcome_advantage = group_advantages.compute_rloo_outcome_advantage


@torch.no_grad()
def estimate_advantages(
    rewards: Tensor, values: Tensor, dones: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Runs GAE with episode ends instead of a mask, for trajectories of steps; nothing is bootstrapped past the last.

    Args: rewards, values, dones: (..., steps); dones is 1 on the step that ends its episode.
    Returns: advantages (not whitened), returns: (..., steps).
    """
    rewards, values = at_least_float32(rewards, values)
    return gae_scan(
        rewards, values, torch.ones_like(values, dtype=torch.bool), dones == 0, gamma, lam
    )


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float = 0.2,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: LossAggMode = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the vanilla loss in its older form: (loss, clip fraction, KL, lower clip fraction), each 0-dim."""
    config = PolicyLossConfig(
        clip_ratio=cliprange,
        clip_ratio_low=cliprange_low,
        clip_ratio_high=cliprange_high,
        clip_ratio_c=clip_ratio_c,
    )
    loss, means = compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config
    )
    return loss, means["actor/pg_clipfrac"], means["actor/ppo_kl"], means["actor/pg_clipfrac_lower"]


def compute_ppo_loss(
    old_log_probs: Tensor,
    new_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any = None,
) -> Tensor:
    """Computes the vanilla loss alone, aggregated as `config.loss_agg_mode` says.

    `config`: a PolicyLossConfig, the actor's section, or a mapping with any of its settings.
    """
    read_from = config.get if hasattr(config, "get") else partial(getattr, config)
    own = {
        name: value
        for name in vars(PolicyLossConfig())
        if (value := read_from(name, None)) is not None
    }
    read, inputs = (
        PolicyLossConfig(**own),
        (old_log_probs, new_log_probs, advantages, response_mask),
    )
    return compute_policy_loss_vanilla(*inputs, read.loss_agg_mode, read)[0]


def compute_entropy_loss(
    logits: Tensor,
    response_mask: Tensor,
    loss_agg_mode: LossAggMode = "token-mean",
    **counts: Unpack[GlobalBatchInfo],
) -> Tensor:
    """Aggregates the policy's entropy in nats as `agg_loss` does, from logits (batch, response_len, vocabulary)."""
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode, **counts)


def compute_kl_penalty(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimates the KL per token by the plain log-ratio (k1), in the inputs' shape."""
    return kl_and_values.kl_penalty(log_probs, ref_log_probs, "kl")


def compute_rewards(
    token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float
) -> Tensor:
    """Subtracts `kl_ratio` times the per-token KL (k1) from the scores: (batch, response_len)."""
    return token_level_scores - kl_ratio * compute_kl_penalty(old_log_prob, ref_log_prob)
