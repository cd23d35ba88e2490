"""Opens the observers of a run: the core's own, those of features, and the user's own.

The order is that: the console line and the progress bar, then each feature's by its
`observer_order` (what a later one reads of an earlier one stands in the report), then
`trainer.observers` as they are listed. Invariant: this file knows no feature by name.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import training.observers
from data.loading import load_object
from data.texts import text_of
from training.config.loader import ConfigError
from training.features import features
from training.observers import ObservedRun, Observer, Observers
from training.run.console import ConsoleLine
from training.run.progress import Progress

logger = logging.getLogger(__name__)
KEY = "trainer.observers"


def open_observers(run: ObservedRun, given: Sequence[Observer] | None = None) -> Observers:
    """Opens a run's observers.

    Args:
        given: in the place of those of features and of `trainer.observers`; None: as the config
            says.

    Raises:
        ConfigError: one of `trainer.observers` is none, or cannot be made.
    """
    named = dict(_own_of_core(run))
    if given is not None:
        _add(named, [(type(observer).__name__, observer) for observer in given])
        return Observers(run, named)
    named |= _of_features(run)
    _add(named, [_of_user(source, run) for source in run.config.trainer.observers])
    return Observers(run, named)


def _own_of_core(run: ObservedRun) -> Iterator[tuple[str, Observer]]:
    """Yields the console line and the progress bar, as far as the config wants them."""
    trainer = run.config.trainer
    if "console" in trainer.logger or trainer.val_only:
        yield "console", ConsoleLine(run)
    if trainer.progress != "off":
        yield "progress", Progress(trainer.progress)


def _of_features(run: ObservedRun) -> dict[str, Observer]:
    """Opens the features' observers, by the features' names; one that raises is left out."""
    brought = [(name, feature) for name, feature in features().items() if feature.observer]
    brought.sort(key=lambda entry: entry[1].observer_order)
    opened: dict[str, Observer] = {}
    for name, feature in brought:
        try:
            observer = load_object(str(feature.observer), f"feature {name}")(run)
        except training.observers.PASSED_ON:
            raise
        except BaseException:
            if training.observers.RAISES:
                raise
            logger.warning("the run goes on without the feature %s", name, exc_info=True)
            continue
        if observer is not None:
            opened[name] = observer
    return opened


def _of_user(source: str, run: ObservedRun) -> tuple[str, Observer]:
    """Makes an observer that `trainer.observers` names; returns it with the name of its class."""
    kind = load_object(source, KEY)
    if not (isinstance(kind, type) and issubclass(kind, Observer)):
        raise ConfigError(
            [
                f"{KEY}={source} is no observer: write `class NAME(Observer)`, with "
                "`from training.observers import Observer`"
            ]
        )
    arguments: tuple[ObservedRun, ...] = ()
    if _takes_run(kind):
        arguments = (run,)
    make: Any = kind
    try:
        return kind.__name__, make(*arguments)
    except training.observers.PASSED_ON:
        raise
    except BaseException as error:
        # Asked for by name: the run is not begun without it.
        raise ConfigError(
            [f"{KEY}={source} cannot be made: {type(error).__name__}: {text_of(error)}"]
        ) from error


def _takes_run(kind: type) -> bool:
    """Checks whether a class is made with an argument."""
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(kind).parameters
    return any(parameter.kind in by_place for parameter in parameters.values())


def _add(named: dict[str, Observer], further: Iterable[tuple[str, Observer]]) -> None:
    """Adds observers; one whose name is taken is called NAME#2, and so on."""
    for name, observer in further:
        number = 1
        free = name
        while free in named:
            number += 1
            free = f"{name}#{number}"
        named[free] = observer
