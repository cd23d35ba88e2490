"""Registries of advantage estimators and policy losses: by what name each is known, and what an estimator needs.

Invariant: a name belongs to one function for good. `training.core_algos` offers all of it; it stands apart so that
files with further estimators and losses can register theirs without importing the built-in ones.
"""

import inspect
from collections.abc import Callable
from enum import Enum, StrEnum
from typing import Any, Literal

import torch
from torch import Tensor

from data.texts import registered, registering
from training.config.algorithm_settings import ESTIMATOR_NEEDS, OFFERED, estimator_needs

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
        ESTIMATOR_NEEDS.setdefault(_plain(name), needs or tuple(field for field in OFFERED if field in parameters))
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

    Args:
        offered: token_level_rewards, response_mask, and whatever the batch and the algorithm config hold: values,
            index, gamma, lam, config, ...; a function with **kwargs is given all of them.
    Raises: ValueError naming the required or declared arguments that were not offered.
    """
    fn = get_adv_estimator_fn(name)
    parameters = inspect.signature(fn).parameters.values()
    named = {p.name: p.default is p.empty for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    # What was declared may not be left out, but where the signature has a default.
    required = dict.fromkeys(estimator_needs(_plain(name)), True) | named
    if missing := {argument for argument, needed in required.items() if needed} - offered.keys():
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
