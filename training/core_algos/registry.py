"""Registries of advantage estimators and policy losses: by what name each is known, and what an estimator needs.

Invariant: a name belongs to one function for good. `training.core_algos` offers all of it; it stands apart so that
files with further estimators and losses can register theirs without importing the built-in ones.
"""

import inspect
from collections.abc import Callable
from enum import Enum, StrEnum
from typing import Any

from torch import Tensor

from data.names import registered, registering
from training.config.needs import ESTIMATOR_NEEDS, OFFERED, estimator_needs

AdvEstimatorFn = Callable[..., tuple[Tensor, Tensor]]
PolicyLossFn = Callable[..., tuple[Tensor, dict[str, Any]]]

# The estimators that are built in; a user's own go by their plain name.
AdvantageEstimator = StrEnum("AdvantageEstimator", {name.upper(): name for name in ESTIMATOR_NEEDS})  # type: ignore[misc]
ADV_ESTIMATOR_REGISTRY: dict[str, AdvEstimatorFn] = {}
POLICY_LOSS_REGISTRY: dict[str, PolicyLossFn] = {}


def _plain(name: str | Enum) -> str:
    return str(name.value) if isinstance(name, Enum) else name


def register_adv_est(name: str | Enum, needs: tuple[str, ...] = ()) -> Callable[[AdvEstimatorFn], AdvEstimatorFn]:
    """Makes an advantage estimator known as `name`; a decorator.

    Args:
        needs: what the estimator reads besides rewards and mask, such as ("values",) or ("index",), of those that
            `training.config.needs.OFFERED` lists. Left out, they are read from its signature.
    Raises: ValueError if another function has the name.
    """

    def decorate(fn: AdvEstimatorFn) -> AdvEstimatorFn:
        registering(ADV_ESTIMATOR_REGISTRY, "advantage estimator", _plain(name))(fn)
        parameters = inspect.signature(fn).parameters
        ESTIMATOR_NEEDS.setdefault(_plain(name), needs or tuple(field for field in OFFERED if field in parameters))
        return fn

    return decorate


def get_adv_estimator_fn(name: str | Enum) -> AdvEstimatorFn:
    """Finds the estimator registered as `name`; ValueError lists the known names."""
    return registered(ADV_ESTIMATOR_REGISTRY, "algorithm.adv_estimator", _plain(name))


def call_adv_estimator(name: str | Enum, **offered: Any) -> tuple[Tensor, Tensor]:
    """Runs an estimator on those of the offered fields and settings that its signature takes.

    Args:
        offered: token_level_rewards, response_mask, and whatever the batch and the algorithm config hold: values,
            index, gamma, lam, config, ...; a function with **kwargs is given all of them.
    Raises: ValueError naming the required or declared arguments that were not offered.
    """
    fn = get_adv_estimator_fn(name)
    parameters = inspect.signature(fn).parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = {p.name for p in parameters if p.name in named and p.default is p.empty}
    # What a signature could take may be left out where it has a default; what was declared may not.
    declared = set(estimator_needs(_plain(name))) - (named - required)
    missing = (required | declared) - offered.keys()
    if missing:
        given = ", ".join(sorted(offered))
        raise ValueError(f"advantage estimator '{_plain(name)}' needs {', '.join(sorted(missing))}; given: {given}")
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
    return registered(POLICY_LOSS_REGISTRY, "actor_rollout_ref.actor.policy_loss.loss_mode", _plain(name))
