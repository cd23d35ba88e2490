"""Registries of advantage estimators and policy losses: who has which name, and what it needs.

A user's own estimator or loss enters itself with the decorators below and is then chosen by its
name in the config. Invariant: a name belongs to one function for good.
"""

import inspect
from collections.abc import Callable
from enum import Enum, StrEnum
from typing import Any, Literal

from torch import Tensor

from data.names import registered, registering
from training.config.estimator_needs import ESTIMATOR_INPUTS, ESTIMATOR_NEEDS
from training.config.estimator_needs import estimator_needs as estimator_needs

Advantages = tuple[Tensor, Tensor]
AdvEstimatorFn = Callable[..., Advantages]
PolicyLossFn = Callable[..., tuple[Tensor, dict[str, Any]]]
# What an estimator has to see at once, see `register_adv_est`.
Span = Literal["scores", "episodes", "groups", "batch"]

# The built-in estimators; a user's own go by their plain name.
AdvantageEstimator = StrEnum(  # type: ignore[misc]
    "AdvantageEstimator",
    {name.upper(): name for name in ESTIMATOR_NEEDS},
)
ADV_ESTIMATOR_REGISTRY: dict[str, AdvEstimatorFn] = {}
POLICY_LOSS_REGISTRY: dict[str, PolicyLossFn] = {}
# By the name of an estimator; read with `estimator_span` and `estimator_whitens_batch`.
ESTIMATOR_SPANS: dict[str, Span] = {}
ESTIMATOR_WHITENS_BATCH: dict[str, bool] = {}


def register_adv_est(
    name: str | Enum,
    needs: tuple[str, ...] = (),
    span: Span = "batch",
    whitens_batch: bool = False,
) -> Callable[[AdvEstimatorFn], AdvEstimatorFn]:
    """Returns a decorator that registers an advantage estimator as `name`.

    The estimator is called with keyword arguments, those that its signature takes, and returns
    (advantages, returns), each (batch, response_len) and zero outside the mask.

    Args:
        needs: what the estimator reads besides rewards and mask, such as ("values",) or
            ("index",), of the ESTIMATOR_INPUTS of training/config/estimator_needs.py. Left out,
            they are read from its signature.
        span: what the estimator has to see at once, so that it can be called on a part of a batch
            whose episodes have very different lengths:
            scores: of each episode its summed reward and its number of tokens alone;
            episodes: single episodes; groups: whole groups (uid); batch: the whole batch.
        whitens_batch: whether the advantages are whitened over the whole batch in the end. Such an
            estimator of a span other than "batch" takes `whiten`, and leaves the whitening to its
            caller where that is False.
    Raises:
        ValueError: another function has the name, or `whitens_batch` and the parameter `whiten`
            do not agree.
    """
    key = _plain_name(name)

    def decorate(fn: AdvEstimatorFn) -> AdvEstimatorFn:
        parameters = inspect.signature(fn).parameters
        if span != "batch":
            _check_whitening(key, whitens_batch, parameters.get("whiten"))
        registering(ADV_ESTIMATOR_REGISTRY, "advantage estimator", key)(fn)
        from_signature = tuple(field for field in ESTIMATOR_INPUTS if field in parameters)
        ESTIMATOR_NEEDS.setdefault(key, needs or from_signature)
        ESTIMATOR_SPANS[key] = span
        ESTIMATOR_WHITENS_BATCH[key] = whitens_batch
        return fn

    return decorate


def _check_whitening(name: str, whitens_batch: bool, parameter: inspect.Parameter | None) -> None:
    """Raises ValueError if the flag and the parameter `whiten` do not agree.

    Episodes of several rows are whitened by the flag, all others by the parameter's default.
    """
    whitens_by_default = parameter is not None and parameter.default is True
    if whitens_batch and not whitens_by_default:
        raise ValueError(
            f"advantage estimator {name!r} is registered with whitens_batch=True and has no "
            "parameter whiten: bool = True: add it, or leave whitens_batch out"
        )
    if parameter is not None and not whitens_batch:
        raise ValueError(
            f"advantage estimator {name!r} has a parameter whiten: register it with "
            "whitens_batch=True, or rename the parameter"
        )


def get_adv_estimator_fn(name: str | Enum) -> AdvEstimatorFn:
    """Returns the estimator registered as `name`; ValueError lists the known names."""
    return registered(ADV_ESTIMATOR_REGISTRY, "algorithm.adv_estimator", _plain_name(name))


def estimator_span(name: str | Enum) -> Span:
    """Returns what the estimator has to see at once; the batch if nothing was registered."""
    return ESTIMATOR_SPANS.get(_plain_name(name), "batch")


def estimator_whitens_batch(name: str | Enum) -> bool:
    """Returns whether the estimator whitens over the batch, unless called with whiten=False."""
    return ESTIMATOR_WHITENS_BATCH.get(_plain_name(name), False)


def call_adv_estimator(name: str | Enum, **offered: Any) -> Advantages:
    """Runs an estimator on those of the offered fields and settings that its signature takes.

    Args:
        offered: token_level_rewards, response_mask, and whatever the batch and the algorithm config
            hold: values, index, gamma, lam, config, …; a function with **kwargs gets all of them.
    Returns: advantages, returns: (batch, response_len) each.
    """
    fn = get_adv_estimator_fn(name)
    return fn(**accepted_arguments(fn, offered))


def accepted_arguments(fn: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """Picks of the offered arguments those that a function's signature takes: all with **kwargs."""
    parameters = inspect.signature(fn).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(offered)
    return {name: value for name, value in offered.items() if name in parameters}


def register_policy_loss(name: str | Enum) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Returns a decorator that registers a policy loss as `name`.

    The loss is called on one micro-batch with those of (old_log_prob, log_prob, advantages,
    response_mask, loss_agg_mode, config, rollout_is_weights) that it takes, and returns
    (loss, metrics): this micro-batch's shares, which are summed. `agg_loss` divides by the whole
    mini-batch's counts there. A metric that is a plain number, no tensor, counts as the
    micro-batch's mean and is weighted with its tokens.

    Raises:
        ValueError: another function has the name.
    """
    return registering(POLICY_LOSS_REGISTRY, "policy loss", _plain_name(name))


def get_policy_loss_fn(name: str | Enum) -> PolicyLossFn:
    """Returns the policy loss registered as `name`; ValueError lists the known names."""
    setting = "actor_rollout_ref.actor.policy_loss.loss_mode"
    return registered(POLICY_LOSS_REGISTRY, setting, _plain_name(name))


def _plain_name(name: str | Enum) -> str:
    if isinstance(name, Enum):
        return str(name.value)
    return name
