"""Registries of advantage estimators and policy losses: by what name each is known, and what an estimator needs.

Invariant: a name belongs to one function for good. `training.core_algos` offers all of it; it stands apart so that
files with further estimators and losses can register theirs without importing the built-in ones.
"""

import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any

from torch import Tensor

from data.names import registered, registering

AdvEstimatorFn = Callable[..., tuple[Tensor, Tensor]]
PolicyLossFn = Callable[..., tuple[Tensor, dict[str, Any]]]

ADV_ESTIMATOR_REGISTRY: dict[str, AdvEstimatorFn] = {}
POLICY_LOSS_REGISTRY: dict[str, PolicyLossFn] = {}
_DECLARED_NEEDS: dict[str, tuple[str, ...]] = {}
# Batch fields that an estimator registered without `needs` may name as arguments.
_BATCH_FIELDS = (
    *("values", "index", "reward_baselines", "old_log_probs", "ref_log_prob", "rollout_log_probs", "sum_pi_squared"),
    *("turn_ids", "episode_id"),
)


def _plain(name: str | Enum) -> str:
    return str(name.value) if isinstance(name, Enum) else name


def register_adv_est(name: str | Enum, needs: tuple[str, ...] = ()) -> Callable[[AdvEstimatorFn], AdvEstimatorFn]:
    """Makes an advantage estimator known as `name`; a decorator.

    Args:
        needs: batch fields the estimator reads besides rewards and mask, such as ("values",) or ("index",). Left out,
            they are read from its signature.
    Raises: ValueError if another function has the name.
    """

    def decorate(fn: AdvEstimatorFn) -> AdvEstimatorFn:
        registering(ADV_ESTIMATOR_REGISTRY, "advantage estimator", _plain(name))(fn)
        if needs:
            _DECLARED_NEEDS[_plain(name)] = tuple(needs)
        return fn

    return decorate


def get_adv_estimator_fn(name: str | Enum) -> AdvEstimatorFn:
    """Finds the estimator registered as `name`; ValueError lists the known names."""
    return registered(ADV_ESTIMATOR_REGISTRY, "algorithm.adv_estimator", _plain(name))


def estimator_needs(name: str | Enum) -> tuple[str, ...]:
    """Lists batch fields that the estimator reads besides rewards and mask: as declared, else as in its signature."""
    parameters = inspect.signature(get_adv_estimator_fn(name)).parameters
    inferred = tuple(field_name for field_name in _BATCH_FIELDS if field_name in parameters)
    return _DECLARED_NEEDS.get(_plain(name), inferred)


def call_adv_estimator(name: str | Enum, **offered: Any) -> tuple[Tensor, Tensor]:
    """Runs an estimator on those of the offered fields and settings that its signature takes.

    Args:
        offered: token_level_rewards, response_mask, and whatever the batch and the algorithm config hold: values,
            index, gamma, lam, config, ...; a function with **kwargs is given all of them.
    Raises: ValueError naming the required or declared arguments that were not offered.
    """
    fn = get_adv_estimator_fn(name)
    parameters = inspect.signature(fn).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = {p.name for p in parameters if p.name in named and p.default is p.empty}
    missing = (required | set(_DECLARED_NEEDS.get(_plain(name), ()))) - offered.keys()
    if missing:
        given = ", ".join(sorted(offered))
        raise ValueError(f"advantage estimator '{_plain(name)}' needs {', '.join(sorted(missing))}; given: {given}")
    return fn(**{key: value for key, value in offered.items() if takes_all or key in named})


def register_policy_loss(name: str | Enum) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Makes a policy loss known as `name`; a decorator. Raises ValueError if another function has the name.

    The loss is called on one micro-batch with those of (old_log_prob, log_prob, advantages, response_mask,
    loss_agg_mode, config) that it takes, and returns (loss, metrics): this micro-batch's shares, which are summed.
    `agg_loss` divides by the whole mini-batch's counts there. A metric that is a plain number, no tensor, counts as
    the micro-batch's mean and is weighted with its tokens.
    """
    return registering(POLICY_LOSS_REGISTRY, "policy loss", _plain(name))


def get_policy_loss_fn(name: str | Enum) -> PolicyLossFn:
    """Finds the policy loss registered as `name`; ValueError lists the known names."""
    return registered(POLICY_LOSS_REGISTRY, "actor_rollout_ref.actor.policy_loss.loss_mode", _plain(name))
