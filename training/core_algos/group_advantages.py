"""Registries, and advantage estimators that compare an episode's reward with its group's, or its role's running mean.

Registries say by what name each estimator and policy loss is known, and what an estimator needs; a name belongs to one
function for good.

Invariant: every estimator is pure (but `rae`, which moves its running means), and rewards of masked tokens change
nothing; the results are zero there. A row without a sampled token leaves its group's statistics. A group of one row
keeps its raw score; the last one of a group whose other rows have no sampled token gets 0.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from data.containers import row_sums
from data.texts import registered, registering, say, warn_once
from training.batch.torch_functional import masked_whiten, sampled_sums
from training.config.algorithm_settings import ESTIMATOR_NEEDS, OFFERED
from training.config.algorithm_settings import estimator_needs as estimator_needs

Advantages = tuple[Tensor, Tensor]
AdvEstimatorFn = Callable[..., tuple[Tensor, Tensor]]
PolicyLossFn = Callable[..., tuple[Tensor, dict[str, Any]]]
Span = Literal["scores", "episodes", "groups", "batch"]

# The estimators that are built in; a user's own go by their plain name.
AdvantageEstimator = StrEnum("AdvantageEstimator", {name.upper(): name for name in ESTIMATOR_NEEDS})  # type: ignore[misc]
ADV_ESTIMATOR_REGISTRY: dict[str, AdvEstimatorFn] = {}
POLICY_LOSS_REGISTRY: dict[str, PolicyLossFn] = {}
# What an estimator has to see at once, where it is not the whole batch.
ESTIMATOR_SPANS: dict[str, Span] = {}


def _plain(name: str | Enum) -> str:
    return str(name.value) if isinstance(name, Enum) else name


def register_adv_est(
    name: str | Enum, needs: tuple[str, ...] = (), span: Span = "batch"
) -> Callable[[AdvEstimatorFn], AdvEstimatorFn]:
    """Makes an advantage estimator known as `name`; a decorator.

    Args:
        needs: what the estimator reads besides rewards and mask, such as ("values",) or ("index",), of those that
            `training.config.algorithm_settings.OFFERED` lists. Left out, they are read from its signature.
        span: what it has to see at once, so that episodes of very different lengths need not be as wide as the longest:
            single episodes, whole groups (uid), or the batch; or of each episode no more than its rewards' sum and how
            many tokens it has. But for the batch, what is whitened over it in the end is not where `whiten` is False.
    Raises: ValueError if another function has the name.
    """

    def decorate(fn: AdvEstimatorFn) -> AdvEstimatorFn:
        registering(ADV_ESTIMATOR_REGISTRY, "advantage estimator", _plain(name))(fn)
        parameters = inspect.signature(fn).parameters
        ESTIMATOR_NEEDS.setdefault(
            _plain(name), needs or tuple(field for field in OFFERED if field in parameters)
        )
        ESTIMATOR_SPANS[_plain(name)] = span
        return fn

    return decorate


def built_in_adv_est(name: str, span: Span = "batch") -> Callable[[AdvEstimatorFn], AdvEstimatorFn]:
    """Registers an estimator as `register_adv_est` does, and has it run without gradients; a decorator."""
    return lambda fn: register_adv_est(name, span=span)(torch.no_grad()(fn))


def get_adv_estimator_fn(name: str | Enum) -> AdvEstimatorFn:
    """Finds the estimator registered as `name`; ValueError lists the known names."""
    return registered(ADV_ESTIMATOR_REGISTRY, "algorithm.adv_estimator", _plain(name))


def call_adv_estimator(name: str | Enum, **offered: Any) -> tuple[Tensor, Tensor]:
    """Runs an estimator on those of the offered fields and settings that its signature takes.

    `offered` are token_level_rewards, response_mask, and whatever the batch and the algorithm config hold: values,
    index, gamma, lam, config, ...; a function with **kwargs is given all of them.
    """
    fn = get_adv_estimator_fn(name)
    return fn(**taken(fn, offered))


def taken(fn: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """Picks of the offered arguments those that a function's signature takes: all of them with **kwargs."""
    parameters = inspect.signature(fn).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {key: value for key, value in offered.items() if takes_all or key in parameters}


def register_policy_loss(name: str | Enum) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Makes a policy loss known as `name`; a decorator. Raises ValueError if another function has the name.

    The loss is called on one micro-batch with those of (old_log_prob, log_prob, advantages, response_mask,
    loss_agg_mode, config, rollout_is_weights) that it takes, and returns (loss, metrics): this micro-batch's shares,
    which are summed. `agg_loss` divides by the whole mini-batch's counts there. A metric that is a plain number, no
    tensor, counts as the micro-batch's mean and is weighted with its tokens.
    """
    return registering(POLICY_LOSS_REGISTRY, "policy loss", _plain(name))


def get_policy_loss_fn(name: str | Enum) -> PolicyLossFn:
    """Finds the policy loss registered as `name`; ValueError lists the known names."""
    return registered(
        POLICY_LOSS_REGISTRY, "actor_rollout_ref.actor.policy_loss.loss_mode", _plain(name)
    )


# Groups


def numbered(keys: Sequence[Any] | np.ndarray, device: torch.device | None = None) -> Tensor:
    """Numbers keys, equal ones alike, from 0 on: (len(keys),) int64."""
    # As strings: object arrays may mix uids with numbers, which cannot be sorted together.
    return torch.from_numpy(np.unique(np.asarray(keys).astype(str), return_inverse=True)[1]).to(
        device
    )


@dataclass
class Groups:
    """Says which group each entry (B,) belongs to, and which of them count in its statistics, which are in float64.

    A group of equal scores must have a deviation of zero, and not of a rounding error over epsilon.
    """

    ids: Tensor
    live: Tensor

    def total(self, per_entry: Tensor) -> Tensor:
        """Sums over the group of each entry: (B,)."""
        return torch.zeros_like(per_entry).index_add(0, self.ids, per_entry)[self.ids]

    @functools.cached_property
    def size(self) -> Tensor:
        """Counts the live entries of each entry's group: (B,)."""
        return self.total(self.live.double())

    def deviation(self, per_entry: Tensor) -> Tensor:
        """Subtracts the mean of the group's live entries: (B,), 0 where an entry is not live."""
        return torch.where(self.live, per_entry - self.mean(per_entry), 0)

    def mean(self, per_entry: Tensor) -> Tensor:
        """Averages the live entries of each entry's group: (B,)."""
        return self.total(torch.where(self.live, per_entry, 0)) / self.size.clamp(min=1)

    def std(self, deviation: Tensor) -> Tensor:
        """Takes each group's unbiased standard deviation, 0 of a single entry: (B,)."""
        return (self.total(deviation**2) / (self.size - 1).clamp(min=1)).sqrt()


class ScoredGroups(Groups):
    """Holds each row's summed reward beside its group; rows without a sampled token are not live.

    Attributes:
        mask: (batch, response_len), the numbers of tokens at each place.
        sampled: (batch, response_len) bool.
        scores: (batch,) float64.
        epsilon: what is added to a standard deviation; None: nothing is divided by one.
        dtype: of the advantages, at least float32.
    """

    def __init__(
        self,
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: np.ndarray,
        epsilon: float | None = None,
    ) -> None:
        self.mask, self.sampled, self.epsilon = response_mask, response_mask.bool(), epsilon
        super().__init__(numbered(index, token_level_rewards.device), self.sampled.any(-1))
        self.scores = sampled_sums(token_level_rewards, self.sampled)
        self.dtype = torch.promote_types(token_level_rewards.dtype, torch.float32)

    @functools.cached_property
    def above_mean(self) -> Tensor:
        """Is the score minus the mean of its group's: (B,)."""
        return self.deviation(self.scores)

    def over_std(self, compared: Tensor) -> Tensor:
        """Divides by the standard deviation of the group's scores, where that is asked for."""
        return (
            compared
            if self.epsilon is None
            else compared / (self.std(self.above_mean) + self.epsilon)
        )

    def alone(self) -> Tensor:
        """Says which live rows are their group's only row: (B,) bool."""
        return self.live & (self.total(torch.ones_like(self.scores)) == 1)

    def advantages(self, compared: Tensor, raw: Tensor | None = None) -> Advantages:
        """Spreads `compared` (B,) over each row's sampled tokens; a group of one gets `raw`, or its score."""
        alone = self.alone()
        if alone.any():
            warn_once(__name__, say("alone_in_group"))
        return self.spread(torch.where(alone, self.scores if raw is None else raw, compared))

    def spread(self, per_row: Tensor) -> Advantages:
        """Gives each sampled token its row's number: (B,) -> twice (batch, response_len)."""
        advantages = torch.where(self.sampled, per_row.to(self.dtype).unsqueeze(-1), 0)
        return advantages, advantages


def group_estimator(
    *names: str,
) -> Callable[[Callable[[ScoredGroups], Tensor]], Callable[..., Advantages]]:
    """Makes a decorator: of scores compared in their groups, (batch,), it makes a registered estimator.

    Its arguments are
        token_level_rewards: (batch, response_len); a row's score is their sum over sampled tokens.
        response_mask: (batch, response_len), 1 on sampled tokens.
        index: (batch,) the prompt group (uid) of each row.
        epsilon, norm_adv_by_std_in_grpo: of those that divide by a standard deviation, the unbiased one.
        config: not read; estimators are handed it by verl's convention.
    and it returns
        advantages, returns (the same): (batch, response_len), zero where the mask is zero.
    """

    def decorate(compare: Callable[[ScoredGroups], Tensor]) -> Callable[..., Advantages]:
        @torch.no_grad()
        def estimate(
            token_level_rewards: Tensor,
            response_mask: Tensor,
            index: np.ndarray,
            epsilon: float = 1e-6,
            norm_adv_by_std_in_grpo: bool = True,
            config: Any = None,
        ) -> Advantages:
            divided_by = epsilon if norm_adv_by_std_in_grpo else None
            group = ScoredGroups(token_level_rewards, response_mask, index, divided_by)
            return group.advantages(compare(group))

        estimate.__name__, estimate.__qualname__, estimate.__doc__ = (
            compare.__name__,
            compare.__name__,
            compare.__doc__,
        )
        for name in names:
            register_adv_est(name, span="scores")(estimate)
        return estimate

    return decorate


@group_estimator("grpo", "grpo_vectorized")
def compute_grpo_outcome_advantage(group: ScoredGroups) -> Tensor:
    """Compares a score with its group, A_i = (r_i - mean r) / (std r + epsilon)  (arXiv:2402.03300, section 4.1.2).

    Without `norm_adv_by_std_in_grpo` the division is left out: Dr.GRPO (arXiv:2503.20783).
    """
    return group.over_std(group.above_mean)


@group_estimator("grpo_passk")
def compute_grpo_passk_outcome_advantage(group: ScoredGroups) -> Tensor:
    """Rewards the best of a group alone, by how far it is above the second, as pass@k does (arXiv:2503.19595).

    A = (r_1 - r_2) / (std r + epsilon); where several are the best nobody gets anything. Raises ValueError for a group
    of one row.
    """
    if group.alone().any():
        raise ValueError(
            "grpo_passk compares the two best of a group, and one has a single row: set rollout.n above 1"
        )
    scores = torch.where(group.live, group.scores, -torch.inf)

    def highest(some: Tensor) -> Tensor:
        return some.new_full(some.shape, -torch.inf).scatter_reduce(0, group.ids, some, "amax")[
            group.ids
        ]

    best = scores == highest(scores)
    second = highest(torch.where(best, -torch.inf, scores))
    wins = group.live & best & (group.total(best.double()) == 1) & (second > -torch.inf)
    return group.over_std(torch.where(wins, group.scores - second, 0))


@group_estimator("rloo", "rloo_vectorized")
def compute_rloo_outcome_advantage(group: ScoredGroups) -> Tensor:
    """Subtracts the leave-one-out baseline, A_i = r_i - mean(r_j, j != i)  (arXiv:2402.14740, eq. 7)."""
    # r_i - (sum - r_i)/(n - 1) = (r_i - mean) n/(n - 1)
    return group.above_mean * group.size / (group.size - 1).clamp(min=1)


@built_in_adv_est("reinforce_plus_plus_baseline", "scores")
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    config: Any = None,
    whiten: bool = True,
) -> Advantages:
    """Subtracts the group's mean, then whitens over all tokens: REINFORCE++ with a baseline (arXiv:2501.03262).

    Args and returns as in `group_estimator`.
    """
    group = ScoredGroups(token_level_rewards, response_mask, index)
    advantages, _ = group.advantages(group.above_mean)
    return (masked_whiten(advantages, response_mask) if whiten else advantages,) * 2


@group_estimator("opo")
def compute_opo_outcome_advantage(group: ScoredGroups) -> Tensor:
    """Subtracts the baseline that weighs a group's scores with their lengths, sum l_j r_j / sum l_j (arXiv:2505.23585).

    A length counts sampled tokens.
    """
    lengths = row_sums(group.mask).double()
    baseline = group.total(lengths * group.scores) / group.total(lengths).clamp(min=1)
    return torch.where(group.live, group.scores - baseline, 0)


@built_in_adv_est("gpg", "scores")
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
) -> Advantages:
    """Subtracts the group's mean, and scales by the share of scores that are not zero: GPG (arXiv:2504.02546).

    A_i = alpha B / B_nonzero (r_i - mean r) / f_norm, with B the rows that have a sampled token. Args and returns as in
    `group_estimator`; a group of one row is scaled, too.
    """
    group = ScoredGroups(token_level_rewards, response_mask, index)
    scale = alpha * group.live.sum() / group.scores.count_nonzero().clamp(min=1) / f_norm
    return group.advantages(group.above_mean * scale, raw=group.scores * scale)


@group_estimator("maxrl")
def compute_maxrl_outcome_advantage(group: ScoredGroups) -> Tensor:
    """Divides the deviation by the group's mean, A_i = (r_i - mean r) / mean r: MaxRL (arXiv:2602.02710).

    Its mean is the gradient of log-likelihood's expansion up to pass@n; scores are to be 0 or more. 0 where the mean
    is 0.
    """
    mean = group.mean(group.scores)
    return torch.where(mean == 0, 0, group.above_mean / torch.where(mean == 0, 1, mean))


@built_in_adv_est("gdpo", "scores")
def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    whiten: bool = True,
) -> Advantages:
    """Normalises each kind of reward in its group before they are added, then whitens: GDPO (arXiv:2601.05242).

    Args:
        config: has gdpo_reward_keys, the names of the rewards, and gdpo_reward_weights; None: 1 each.
        non_tensor_batch: has (batch,) numbers under these names.
        The rest, and returns, as in `group_estimator`. Without a config the reward is one kind.
    """
    keys, weights = (
        ((), ()) if config is None else (config.gdpo_reward_keys, config.gdpo_reward_weights)
    )
    kinds = [_one_kind(non_tensor_batch or {}, key, response_mask) for key in keys] or [
        token_level_rewards
    ]
    total = sum(
        weight
        * compute_grpo_outcome_advantage(
            rewards, response_mask, index, epsilon, norm_adv_by_std_in_grpo
        )[0]
        for rewards, weight in zip(kinds, weights or [1.0] * len(kinds), strict=True)
    )
    return (masked_whiten(total, response_mask) if whiten else total,) * 2


def _one_kind(columns: Mapping[str, Any], key: str, response_mask: Tensor) -> Tensor:
    """Puts a column's numbers on each row's first sampled token: (batch, response_len)."""
    # None: the function gave none here.
    numbers = [
        float(value or 0) for value in registered(columns, "algorithm.gdpo_reward_keys", key)
    ]
    scores = torch.tensor(numbers, dtype=torch.float64, device=response_mask.device)
    first = response_mask.bool() & (response_mask.bool().cumsum(-1) == 1)
    return first * scores[:, None]


@built_in_adv_est("rae", "scores")
def compute_rae_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    role: np.ndarray,
    state: dict[str, float],
    decay: float = 0.95,
) -> Advantages:
    """Subtracts the running mean of its role's scores, A_i = r_i - b_role: RAE (arXiv:2506.24119, section 3.3).

    Args:
        token_level_rewards, response_mask: (batch, response_len).
        role: (batch,) whom each row plays.
        state: role -> running mean, from 0 on. It moves once this batch has been compared with it, so that no score is
            compared with itself: of m scores of a role each keeps `decay`, b = decay^m b + (1 - decay^m) mean r.
    Returns:
        advantages, returns (the same): (batch, response_len), zero where the mask is zero.
    """
    group = ScoredGroups(token_level_rewards, response_mask, role)
    names = [str(name) for name in role]
    baselines = torch.tensor(
        [state.get(name, 0.0) for name in names], dtype=torch.float64, device=group.scores.device
    )
    kept = decay**group.size
    moved = kept * baselines + (1 - kept) * group.mean(group.scores)
    state |= dict(zip(names, moved.tolist(), strict=True))
    return group.spread(group.scores - baselines)
