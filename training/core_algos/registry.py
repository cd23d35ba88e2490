"""Registries of advantage estimators and policy losses: who has which name, and what it needs.

A user's own estimator or loss enters itself with the decorators below and is then chosen by its
name in the config. Invariant: a name belongs to one function for good.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args

from data.names import registered, registering
from training.core_algos.built_in import (
    ESTIMATOR_INPUTS,
    ESTIMATOR_NEEDS,
    ESTIMATORS_THAT_READ_ROWS,
    FORMULA_MODULES,
    LOSSES_THAT_READ_ROWS,
)
from training.core_algos.built_in import estimator_needs as estimator_needs

if TYPE_CHECKING:
    from torch import Tensor

Advantages = tuple["Tensor", "Tensor"]
AdvEstimatorFn = Callable[..., Advantages]
PolicyLossFn = Callable[..., tuple["Tensor", dict[str, Any]]]
# What an estimator has to see at once, and what it compares: see `EstimatorFacts`.
Span = Literal["scores", "episodes", "groups", "batch"]
Compared = Literal["group", "turns", "states"]


@dataclass(frozen=True, kw_only=True)
class EstimatorFacts:
    """Holds what an estimator says of itself, for those who call it, watch it or show it.

    Nobody else knows an estimator by its name: alarms and viewer read this.

    Attributes:
        span: what it has to see at once, so that it can be called on a part of a batch whose
            episodes have very different lengths:
            scores: of each episode its summed reward and its number of tokens alone;
            episodes: single episodes; groups: whole groups (uid); batch: the whole batch.
        whitens_batch: whether the advantages are whitened over the whole batch in the end.
        formula: how a reward becomes an advantage, in words, for those who read an episode.
        compares: what it compares: the scores of a group's episodes, so that equal ones get an
            advantage of 0 (whitening apart); the returns of a group's turns of one number; or
            scores, and turns of a group that began in the same state.
        ordered: whether it gives an episode one number that a better score in its group never makes
            smaller; None: nothing is said.
        follows_returns: whether advantages rise with returns less values over the tokens of a batch
            (values are 0 for one that reads none), however they are scaled or shifted.
    """

    span: Span = "batch"
    whitens_batch: bool = False
    formula: str = ""
    compares: Compared | None = None
    ordered: bool | None = None
    follows_returns: bool = False

    def __post_init__(self) -> None:
        """Requires the allowed words.

        Raises:
            ValueError: `span` or `compares` is another one.
        """
        if self.span not in get_args(Span):
            raise ValueError(f"span={self.span!r}: allowed are {', '.join(get_args(Span))}")
        if self.compares is not None and self.compares not in get_args(Compared):
            allowed = ", ".join(get_args(Compared))
            raise ValueError(f"compares={self.compares!r}: allowed are {allowed}, or None")


# The built-in estimators; a user's own go by their plain name.
AdvantageEstimator = StrEnum(  # type: ignore[misc]
    "AdvantageEstimator",
    {name.upper(): name for name in ESTIMATOR_NEEDS},
)
ADV_ESTIMATOR_REGISTRY: dict[str, AdvEstimatorFn] = {}
POLICY_LOSS_REGISTRY: dict[str, PolicyLossFn] = {}
# By the name of an estimator; read with `estimator_facts`.
ESTIMATOR_FACTS: dict[str, EstimatorFacts] = {}
_NOTHING_SAID = EstimatorFacts()


@cache
def load_built_in() -> None:
    """Imports the files of this package whose estimators and losses register themselves."""
    for module in FORMULA_MODULES:
        import_module(f"{__package__}.{module}")


def register_adv_est(
    name: str | Enum,
    needs: tuple[str, ...] = (),
    span: Span = "batch",
    whitens_batch: bool = False,
    *,
    formula: str = "",
    compares: Compared | None = None,
    ordered: bool | None = None,
    follows_returns: bool = False,
    reads_rows: str = "",
    aliases: tuple[str, ...] = (),
) -> Callable[[AdvEstimatorFn], AdvEstimatorFn]:
    """Returns a decorator that registers an advantage estimator as `name`.

    The estimator is called with keyword arguments, those that its signature takes, and returns
    (advantages, returns), each (batch, response_len) and zero outside the mask.

    Args:
        needs: what the estimator reads besides rewards and mask, such as ("values",) or
            ("index",), of the ESTIMATOR_INPUTS of training/core_algos/built_in.py. Left out,
            they are read from its signature.
        span, formula, compares, ordered, follows_returns: see `EstimatorFacts`. What is left out
            is not watched, and not shown.
        whitens_batch: see `EstimatorFacts`. Such an estimator of a span other than "batch" takes
            `whiten`, and leaves the whitening to its caller where that is False.
        reads_rows: "why; what to do", two parts of a sentence behind the estimator's name, where
            its numbers depend on how an episode is cut into rows: a run then refuses such episodes.
            "": they do not.
        aliases: further names of the same estimator.
    Raises:
        ValueError: another function has the name; `span` or `compares` is not allowed;
            `whitens_batch` and the parameter `whiten` do not agree; or `needs` has a name that no
            batch has.
    """
    unknown = [field for field in needs if field not in ESTIMATOR_INPUTS]
    if unknown:
        raise ValueError(
            f"needs={needs!r} of {_plain_name(name)}: allowed are {', '.join(ESTIMATOR_INPUTS)}"
        )
    facts = EstimatorFacts(
        span=span,
        whitens_batch=whitens_batch,
        formula=formula,
        compares=compares,
        ordered=ordered,
        follows_returns=follows_returns,
    )

    def decorate(fn: AdvEstimatorFn) -> AdvEstimatorFn:
        _load_before(fn)
        parameters = inspect.signature(fn).parameters
        from_signature = tuple(field for field in ESTIMATOR_INPUTS if field in parameters)
        for key in (_plain_name(name), *aliases):
            if span != "batch":
                _check_whitening(key, whitens_batch, parameters.get("whiten"))
            registering(ADV_ESTIMATOR_REGISTRY, "advantage estimator", key)(fn)
            ESTIMATOR_NEEDS.setdefault(key, needs or from_signature)
            ESTIMATOR_FACTS[key] = facts
            if reads_rows:
                ESTIMATORS_THAT_READ_ROWS[key] = reads_rows
        return fn

    return decorate


def _load_before(fn: Callable[..., Any]) -> None:
    """Loads the built-in formulas before a user's own, so that no name of theirs is taken."""
    # Code that was executed from a text has no module.
    if not (fn.__module__ or "").startswith(f"{__package__}."):
        load_built_in()


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
    load_built_in()
    return registered(ADV_ESTIMATOR_REGISTRY, "algorithm.adv_estimator", _plain_name(name))


def estimator_facts(name: str | Enum) -> EstimatorFacts:
    """Returns what the estimator says of itself; of an unknown one nothing is said."""
    load_built_in()
    return ESTIMATOR_FACTS.get(_plain_name(name), _NOTHING_SAID)


def estimator_span(name: str | Enum) -> Span:
    """Returns what the estimator has to see at once; the batch if nothing was registered."""
    return estimator_facts(name).span


def estimator_whitens_batch(name: str | Enum) -> bool:
    """Returns whether the estimator whitens over the batch, unless called with whiten=False."""
    return estimator_facts(name).whitens_batch


def register_policy_loss(
    name: str | Enum, *, reads_rows: str = ""
) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Returns a decorator that registers a policy loss as `name`.

    The loss is called on one micro-batch with those of (old_log_prob, log_prob, advantages,
    response_mask, loss_agg_mode, config, rollout_is_weights) that it takes, and returns
    (loss, metrics): this micro-batch's shares, which are summed. `agg_loss` divides by the whole
    mini-batch's counts there. A metric that is a plain number, no tensor, counts as the
    micro-batch's mean and is weighted with its tokens.

    Args:
        reads_rows: as of `register_adv_est`, for a loss that reads more of a row than its tokens.
    Raises:
        ValueError: another function has the name.
    """

    def decorate(fn: PolicyLossFn) -> PolicyLossFn:
        _load_before(fn)
        registered_loss = registering(POLICY_LOSS_REGISTRY, "policy loss", _plain_name(name))(fn)
        if reads_rows:
            LOSSES_THAT_READ_ROWS[_plain_name(name)] = reads_rows
        return registered_loss

    return decorate


def get_policy_loss_fn(name: str | Enum) -> PolicyLossFn:
    """Returns the policy loss registered as `name`; ValueError lists the known names."""
    load_built_in()
    setting = "actor_rollout_ref.actor.policy_loss.loss_mode"
    return registered(POLICY_LOSS_REGISTRY, setting, _plain_name(name))


def _plain_name(name: str | Enum) -> str:
    if isinstance(name, Enum):
        return str(name.value)
    return name
