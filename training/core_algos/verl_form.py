"""verl's form of losses and estimators: arguments by name, and counts that nobody hands on.

A policy loss that is written for verl is called with

    (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)
        -> (loss, metrics)

or those of them that its signature has, and with fields of the batch that it names:

    old_log_prob, log_prob, advantages, response_mask: (batch, response_len); log-probs in nats.
    loss_agg_mode: see `agg_loss`.
    config: `PolicyLossConfig` or anything with its fields; None means its defaults.
    rollout_is_weights: (batch, response_len) importance weights that multiply each token's loss, or
        None.

Its `agg_loss(losses, mask, mode)` divides by the mini-batch's counts, which an update sets around
the call (`denominators`). Losses of this project are formulas of `LossInputs`, which hold their
counts; `policy_loss` registers a formula in verl's form, so that either may call it.

Invariant: the context and the inspection of signatures serve this form alone and stand here alone.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, cast

import numpy as np
from torch import Tensor

from training.core_algos.aggregation import (
    GlobalBatchInfo,
    LossAggMode,
    aggregate,
    mean_of_tokens,
)
from training.core_algos.loss_inputs import Formula, Loss, LossInputs
from training.core_algos.loss_settings import PolicyLossConfig
from training.core_algos.registry import (
    Advantages,
    PolicyLossFn,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    register_policy_loss,
)


@dataclass(frozen=True)
class _Update:
    """Holds the mini-batch whose loss is being computed; empty outside an update.

    Attributes:
        counts: its denominators, for losses that hand none on to `agg_loss`.
        row_weights: (batch,) the share of its episode that each row of the micro-batch has.
    """

    counts: GlobalBatchInfo = field(default_factory=GlobalBatchInfo)
    row_weights: Tensor | None = None


_NO_UPDATE = _Update()
_UPDATE: ContextVar[_Update] = ContextVar("update", default=_NO_UPDATE)


class VerlLoss(Protocol):
    """Describes a formula in verl's form; `formula` is what an update of ours calls."""

    formula: Formula

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: LossAggMode = ...,
        config: Any = ...,
        rollout_is_weights: Tensor | None = ...,
    ) -> Loss:
        """Computes the loss of one micro-batch."""


@contextmanager
def denominators(counts: GlobalBatchInfo, row_weights: Tensor | None = None) -> Iterator[None]:
    """Makes every `agg_loss` inside the context that gets no counts divide by these.

    Args:
        counts: all four, of the whole mini-batch.
        row_weights: (batch,) as of `aggregate`.
    """
    before = _UPDATE.set(_Update(counts, row_weights))
    try:
        yield
    finally:
        _UPDATE.reset(before)


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: LossAggMode | None,
    dp_size: int = 1,
    batch_num_tokens: int | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Turns token losses into a scalar, as `aggregate` does.

    Inside an update a call that gives neither dp_size nor counts gets those of the update; the
    weights of rows are always the update's. Args, returns and errors: see `aggregate`.
    """
    counts = GlobalBatchInfo(
        dp_size=dp_size,
        batch_num_tokens=batch_num_tokens,
        global_batch_size=global_batch_size,
        loss_scale_factor=loss_scale_factor,
    )
    return aggregate(
        loss_mat,
        loss_mask,
        loss_agg_mode,
        **_counts_in_force(counts),
        row_weights=_UPDATE.get().row_weights,
    )


def token_fraction(per_token: Tensor, mask: Tensor, counts: Mapping[str, Any]) -> Tensor:
    """Averages a number over tokens, detached, as `mean_of_tokens` does.

    Where `counts` has no batch_num_tokens, the update's counts.
    """
    if counts.get("batch_num_tokens") is None:
        counts = _UPDATE.get().counts
    return mean_of_tokens(per_token, mask, counts)


def _counts_in_force(given: GlobalBatchInfo) -> GlobalBatchInfo:
    """Returns the counts that a loss was given, or where it was given none those of the update."""
    has_counts = (
        given.get("dp_size", 1) != 1
        or given.get("batch_num_tokens") is not None
        or given.get("global_batch_size") is not None
    )
    update = _UPDATE.get()
    if has_counts or not update.counts:
        return given
    return update.counts


def policy_loss(
    name: str, loss_agg_mode: LossAggMode = "token-mean", *, reads_rows: str = ""
) -> Callable[[Formula], VerlLoss]:
    """Returns a decorator that registers a formula as the policy loss `name`, in verl's form.

    Args:
        name, reads_rows: as of `register_policy_loss`.
        loss_agg_mode: its default for the argument of that name.
    """
    default_mode = loss_agg_mode

    def decorate(formula: Formula) -> VerlLoss:
        def loss(
            old_log_prob: Tensor,
            log_prob: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            loss_agg_mode: LossAggMode = default_mode,
            config: Any = None,
            rollout_is_weights: Tensor | None = None,
        ) -> Loss:
            if config is None:
                config = PolicyLossConfig()
            inputs = LossInputs(
                old_log_prob=old_log_prob,
                log_prob=log_prob,
                advantages=advantages,
                mask=response_mask.bool(),
                loss_agg_mode=loss_agg_mode,
                config=config,
                importance_weights=rollout_is_weights,
                counts=_counts_in_force(config.global_batch_info),
                row_weights=_UPDATE.get().row_weights,
            )
            return formula(inputs)

        # Not functools.wraps: callers read the signature, which is verl's and not the formula's.
        loss.__module__ = formula.__module__
        loss.__name__ = formula.__name__
        loss.__qualname__ = formula.__qualname__
        loss.__doc__ = formula.__doc__
        register = register_policy_loss(name, reads_rows=reads_rows)
        return cast(VerlLoss, register(of_formula(formula)(loss)))

    return decorate


def of_formula(formula: Formula) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Returns a decorator that tells of a loss in verl's form which formula it computes."""

    def decorate(loss: PolicyLossFn) -> PolicyLossFn:
        loss.formula = formula  # type: ignore[attr-defined]
        return loss

    return decorate


def policy_loss_formula(name: str | Enum) -> Formula | None:
    """Returns the formula that is registered as `name`; None of a loss in verl's form alone.

    Raises:
        ValueError: the name is unknown.
    """
    return getattr(get_policy_loss_fn(name), "formula", None)


def call_policy_loss(
    name: str,
    arguments: dict[str, Any],
    counts: GlobalBatchInfo | None = None,
    row_weights: Tensor | None = None,
) -> Loss:
    """Runs a policy loss on those of the arguments that its signature takes.

    Losses written for older versions of verl lack some of them.

    Args:
        arguments: those of verl's form, and fields of the batch.
        counts, row_weights: of the update, see `denominators`.
    Raises:
        ValueError: it does not return (loss, metrics), a metric is no number, or it needs an
            argument that is not there.
    """
    function = get_policy_loss_fn(name)
    _require_arguments(function, name, arguments)
    with denominators(counts or GlobalBatchInfo(), row_weights):
        result = function(**accepted_arguments(function, arguments))
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise ValueError(
            f"policy loss '{name}' must return (loss, metrics), metrics being a dict; "
            f"it returned {type(result).__name__}"
        )
    for metric, value in result[1].items():
        if not isinstance(value, Tensor | int | float | np.number):
            raise ValueError(
                f"policy loss '{name}' returned {value!r:.100} for the metric {metric!r}; allowed: "
                "a number, or a tensor of one"
            )
    return result


def _require_arguments(function: Any, name: str, arguments: dict[str, Any]) -> None:
    """Raises ValueError where a policy loss needs an argument that the batch does not give it."""
    for parameter in inspect.signature(function).parameters.values():
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        is_required = is_named and parameter.default is parameter.empty
        if is_required and parameter.name not in arguments:
            raise ValueError(
                f"policy loss '{name}' takes {parameter.name}, which no batch brings: compute it "
                "in training/step_phases.py (_add_loss_fields) and list it in POLICY_LOSS_FIELDS "
                "(workers/model/loss_fields.py), or give the parameter a default"
            )


def call_adv_estimator(name: str | Enum, **offered: Any) -> Advantages:
    """Runs an estimator on those of the offered fields and settings that its signature takes.

    Args:
        offered: token_level_rewards, response_mask, and whatever the batch and the algorithm config
            hold: values, index, gamma, lam, config, …; a function with **kwargs gets all of them.
    Returns: advantages, returns: (batch, response_len) each.
    """
    fn = get_adv_estimator_fn(name)
    return fn(**accepted_arguments(fn, offered))


def accepted_arguments(
    fn: Callable[..., Any], offered: dict[str, Any], *, reads_all: bool = True
) -> dict[str, Any]:
    """Picks of the offered arguments those that a function's signature takes: all with **kwargs.

    With `reads_all` false those alone that it names.
    """
    parameters = inspect.signature(fn).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if takes_all and reads_all:
        return dict(offered)
    return {name: value for name, value in offered.items() if name in parameters}
