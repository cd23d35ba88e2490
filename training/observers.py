"""What a run tells those who watch it: `Observer`; and the list of them that a trainer holds.

An observer reads and changes nothing: with all observers off, weights and metrics are bitwise what
they are with them. A run calls, on the driver:

    went_to                                the run begins, or goes on from a checkpoint
    run_started                            `fit` begins
      generation_begins -> played -> generation_ends    of a step, or of a validation
      update_begins -> scored -> step_made              of a step
      validation_begins -> (generation and scores, as above) -> validation_made -> validated
      step_logged -> wants_to_stop                      `checkpoint_saved` comes when it is written
    run_ended                              `fit` has ended
    closed                                 the trainer is shut down

With `trainer.async_level` steps are played ahead of the one that is trained on, in threads, so that
`generation_begins`, `played` and `generation_ends` may come at any time. Invariant: an observer
that raises, or asks for the end by sys.exit(), costs itself and not the run: it is off from then
on, which is said once. Ctrl-C and out of memory pass through.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.own_process import one_process
from data.plain_state import plain_copy
from data.protocol import DataProto
from data.texts import printable, text_of, with_printable_names
from training.config import PPOConfig

logger = logging.getLogger(__name__)

# Whether an observer's error ends the run, as in our tests.
RAISES = False

Metrics = dict[str, float]
# An observer does not keep these to itself: Ctrl-C, a generator's end, and memory that ran out.
PASSED_ON = (KeyboardInterrupt, GeneratorExit, MemoryError, torch.OutOfMemoryError)
# Rows of validation: mappings with `input` and `output` (text) and `score` (a number).
Generations = Sequence[Mapping[str, Any]]
Answer = TypeVar("Answer")


@dataclass(kw_only=True)
class ObservedRun:
    """Says what is known of a run. The trainer keeps it true; observers read it.

    Attributes:
        config: the run's.
        run_dir: its folder.
        tokenizer: the policy's; None: not known.
        steps_per_epoch: after how many steps prompts come again; None: not known.
        textless_ids: of tokens that say nothing; see `training/run/metrics/textless_ids.py`.
        paid_by_environment: the environment's rewards are the scores, and nothing else is.
        val_paid_by_environment: the same of validation.
        total_steps: of the whole run; None: not known.
        step: that the run stands at: made last, or being made.
        changes: of settings, with which the run goes on: key -> (before, after).
        sampler: of the training rows, of a feature or of the user's; None: rows are shuffled.
    """

    config: PPOConfig
    run_dir: Path
    tokenizer: PreTrainedTokenizerBase | None = None
    steps_per_epoch: int | None = None
    textless_ids: Sequence[int] = ()
    paid_by_environment: bool = False
    val_paid_by_environment: bool = False
    total_steps: int | None = None
    step: int = 0
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    sampler: Any = None


class Notice(NamedTuple):
    """Tells of something in a step that people should look at, for the observers that come later.

    Attributes:
        name: what it is, in a word.
        text: a sentence on it.
        view: the viewer's address of what it is about, behind its #; None: there is none.
    """

    name: str
    text: str
    view: str | None = None


class StopRequest(NamedTuple):
    """Asks for the end of a run behind the step that was made; says why, and the exit code."""

    reason: str
    exit_code: int


class RunStopped(RuntimeError):
    """Ends a run as an observer asked for; its text is the reason.

    Attributes:
        exit_code: of the process.
    """

    def __init__(self, reason: str, exit_code: int = 1) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Holds a step that was made.

    Attributes:
        step: its number.
        batch: what it generated and scored, with all fields that its phases added.
        updated: the rows that the updates were given, once `StepPhases.resample` had chosen them
            and features had added to them (training/step_additions.py); None: those of the batch.
        metrics: of the step, those of earlier observers among them.
        records: what each rank's probes recorded, by the probe's name.
        notices: of earlier observers; an observer appends its own. The run's page shows all of
            them, once the step is logged.
    """

    step: int
    batch: DataProto
    updated: DataProto | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    records: Sequence[Mapping[str, Any]] = ()
    notices: list[Notice] = field(default_factory=list)


class Observer:
    """Watches a run; every method may be left out.

    It is made with the `ObservedRun` where its `__init__` takes an argument, else without.
    """

    def went_to(self, step: int, in_flight: Sequence[int]) -> None:
        """Sees that the run begins (0), or goes on from a checkpoint of this step.

        Args:
            in_flight: steps behind it that are generated already.
        """

    def run_started(self, step: int, in_flight: Sequence[int]) -> None:
        """Sees that steps are about to be made behind this one; arguments as of `went_to`."""

    def generation_begins(self, step: int, validate: bool) -> None:
        """Sees that the episodes of a step, or of its validation, begin to play."""

    def generation_ends(self, step: int, validate: bool) -> None:
        """Sees that they have ended, or failed."""

    def validation_begins(self, step: int) -> None:
        """Sees that the validation of a step begins, whose batches are to come."""

    def played(self, batch: DataProto, step: int, validate: bool) -> None:
        """Sees a batch of a step, or of its validation, as it was played; scores are to come."""

    def scored(self, batch: DataProto, scores: Tensor) -> None:
        """Sees what the rows of a batch were given, before anything is made of it.

        A step's batch comes behind `update_begins`; validation's, and with dynamic sampling all
        that groups are chosen from, come as they were played, with `token_level_scores`. The
        batch's meta_info has `global_steps` and `validate`.

        Args:
            scores: (B, R) float32.
        """

    def update_begins(self, batch: DataProto) -> None:
        """Sees a step's batch whose update begins, once groups that are too old are masked."""

    def step_made(self, report: StepReport) -> Mapping[str, float] | None:
        """Sees a step that was made; returns metrics to add to those of the step, if any."""
        return None

    def validation_made(self, facts: Sequence[Mapping[str, Any]]) -> Mapping[str, float] | None:
        """Sees a validation, or an evaluation, that was played; returns metrics to add, if any.

        They stand as val-aux/NAME among the validation's.

        Args:
            facts: of each episode; none where prompts were answered.
        """
        return None

    def validated(self, step: int, metrics: Mapping[str, float], generations: Generations) -> None:
        """Sees a validation's metrics, and as many answers as `trainer.log_val_generations`."""

    def checkpoint_saved(self, step: int) -> None:
        """Sees that the checkpoint of a step is complete; it may have begun some steps before."""

    def step_logged(self, metrics: Mapping[str, float]) -> None:
        """Sees all metrics of a step, behind its validation and save; `ObservedRun.step` is its.

        Those of a validation before the first step come alone.
        """

    def wants_to_stop(self) -> StopRequest | None:
        """Returns why the run is to end now, and with which exit code; None: it goes on."""
        return None

    def run_ended(self, error: BaseException | None) -> None:
        """Sees that no further step is made, and what ended the run; None: it is done."""

    def summary(self) -> str:
        """Returns what the command line prints behind a run that came to its end; "": nothing."""
        return ""

    def closed(self) -> None:
        """Gives back what it holds: the trainer is shut down. An observer that is off hears it."""

    def state_dict(self) -> Mapping[str, Any]:
        """Returns what a checkpoint keeps: numbers, strings, tensors, and lists and dicts of them.

        It is asked at the end of every step.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's `state_dict`, which was not empty."""


class Observers:
    """Tells observers, in order, what happens in a run, and switches off those that raise.

    Args:
        run: what is known of the run.
        named: observers by the names under which checkpoints keep their states.
    """

    def __init__(self, run: ObservedRun, named: Mapping[str, Observer]) -> None:
        self.run = run
        self.named = dict(named)
        self.off: set[str] = set()
        # A checkpoint's states of observers that this run does without.
        self._others_states: dict[str, Any] = {}
        # The last good state of each observer that has one.
        self._last_states: dict[str, Any] = {}

    # The run

    def went_to(self, step: int, in_flight: Sequence[int] = ()) -> None:
        """Tells that the run begins, or goes on from a checkpoint."""
        self.run.step = step
        self._tell(lambda observer: observer.went_to(step, in_flight))

    @contextmanager
    def watching(self, step: int, in_flight: Sequence[int] = ()) -> Iterator[None]:
        """Tells that the steps of the block are made, and how the block ends."""
        self.run.step = step
        try:
            self._tell(lambda observer: observer.run_started(step, in_flight))
            yield
        except BaseException as error:
            with _cause_kept():
                self._tell_end(error)
            raise
        self._tell_end(None)

    def _tell_end(self, error: BaseException | None) -> None:
        self._tell(lambda observer: observer.run_ended(error))

    def summaries(self) -> list[str]:
        """Returns what is printed behind a run that came to its end."""
        texts = self._tell(lambda observer: _summary_text(observer.summary()))
        return [text for text in texts.values() if text]

    def closed(self) -> None:
        """Tells that the trainer is shut down, also those that are off."""
        for name, observer in self.named.items():
            with self._costing_itself(name):
                observer.closed()

    # Playing

    @contextmanager
    def generating(self, step: int, *, validate: bool) -> Iterator[None]:
        """Tells that the block plays a step's episodes, or its validation's."""
        self._tell(lambda observer: observer.generation_begins(step, validate))
        try:
            yield
        except BaseException:
            with _cause_kept():
                self._tell(lambda observer: observer.generation_ends(step, validate))
            raise
        self._tell(lambda observer: observer.generation_ends(step, validate))

    def played(self, batch: DataProto) -> None:
        """Tells of a batch as it was played."""
        step = int(batch.meta_info.get("global_steps", self.run.step))
        validate = bool(batch.meta_info.get("validate"))
        self._tell(lambda observer: observer.played(batch, step, validate))

    def scored(self, batch: DataProto, scores: Tensor) -> None:
        """Tells what the rows of a batch were given, (B, R)."""
        self._tell(lambda observer: observer.scored(batch, scores))

    def validation_begins(self, step: int) -> None:
        """Tells that the validation of a step begins."""
        self._tell(lambda observer: observer.validation_begins(step))

    # A step

    def update_begins(self, batch: DataProto, step: int) -> None:
        """Tells that the update of a step begins."""
        self.run.step = step
        self._tell(lambda observer: observer.update_begins(batch))

    def step_made(self, report: StepReport) -> Metrics:
        """Tells of a step that was made; returns the observers' metrics."""
        added: Metrics = {}
        for name, observer in self._working():
            with self._costing_itself(name):
                # Each has a copy of its own, so that what it writes there reaches nobody.
                there = {**report.metrics, **added}
                with _checked_notices(report.notices):
                    own = observer.step_made(replace(report, metrics=dict(there))) or {}
                added |= _new_metrics(own, there, "step_made")
        return added

    def validation_made(self, facts: Sequence[Mapping[str, Any]]) -> Metrics:
        """Tells of a validation that was played; returns the observers' metrics."""
        added: Metrics = {}
        for name, observer in self._working():
            with self._costing_itself(name):
                own = observer.validation_made(facts) or {}
                added |= _new_metrics(own, added, "validation_made")
        return added

    def validated(self, step: int, metrics: Mapping[str, float], generations: Generations) -> None:
        """Tells of a validation."""
        self.run.step = step
        self._tell(lambda observer: observer.validated(step, dict(metrics), generations))

    def checkpoint_saved(self, step: int) -> None:
        """Tells that a checkpoint is complete."""
        self._tell(lambda observer: observer.checkpoint_saved(step))

    def step_logged(self, metrics: Mapping[str, float]) -> None:
        """Tells all metrics of a step, if there are any."""
        if metrics:
            self._tell(lambda observer: observer.step_logged(dict(metrics)))

    def stop_if_asked(self) -> None:
        """Raises RunStopped where an observer wants the run to end."""
        requests = self._tell(lambda observer: _stop_request(observer.wants_to_stop()))
        for request in requests.values():
            if request is not None:
                raise RunStopped(request.reason, request.exit_code)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns the observers' states by name; they are copies."""
        states = self._tell(lambda observer: plain_copy(observer.state_dict()))
        kept = {name: state for name, state in states.items() if state}
        self._last_states |= kept
        # One that is off keeps what it had last, for a run that goes on without its fault.
        left = {name: state for name, state in self._last_states.items() if name in self.off}
        return self._others_states | left | kept

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`; states of observers that are not there are kept for later."""
        self._others_states = {}
        for name, state in states.items():
            if name not in self.named:
                self._others_states[name] = state
            elif name not in self.off:
                self._last_states[name] = state
                with self._costing_itself(name):
                    self.named[name].load_state_dict(state)

    # Telling

    def _working(self) -> list[tuple[str, Observer]]:
        return [(name, each) for name, each in self.named.items() if name not in self.off]

    def _tell(self, tell: Callable[[Observer], Answer]) -> dict[str, Answer]:
        """Calls each observer; returns the answers of those that did not raise."""
        answers = {}
        for name, observer in self._working():
            with self._costing_itself(name):
                answers[name] = tell(observer)
        return answers

    @contextmanager
    def _costing_itself(self, name: str) -> Iterator[None]:
        """Switches the observer off where the block raises, and says so."""
        try:
            with one_process(f"observer {name}"):
                yield
        except PASSED_ON:
            raise
        # Also what is no Exception: sys.exit(), a cancelled task, a panic of a library in Rust.
        except BaseException as error:
            if RAISES:
                raise
            if name not in self.off:
                logger.warning(
                    "observer %s is off, the run goes on without it: %s: %s",
                    name,
                    type(error).__name__,
                    text_of(error),
                    exc_info=True,
                )
            self.off.add(name)


@contextmanager
def _cause_kept() -> Iterator[None]:
    """Logs what the block raises: what ended the run before it is what is to be told."""
    try:
        yield
    except Exception:
        logger.exception("an observer failed as the run ended")


@contextmanager
def _checked_notices(notices: list[Notice]) -> Iterator[None]:
    """Checks what an observer appends in the block; if it raises, or one is no Notice, none stays.

    Raises:
        TypeError: one is no Notice, or its parts are no texts.
    """
    before = list(notices)
    added: list[Notice] = []
    try:
        yield
        added = notices[len(before) :]
    finally:
        # Those of earlier observers are theirs.
        notices[:] = before
    notices += [_checked_notice(notice) for notice in added]


def _checked_notice(notice: Any) -> Notice:
    """Returns a notice whose texts can be written; raises TypeError where it is none."""
    if isinstance(notice, Notice):
        name, text, view = notice
        if isinstance(name, str) and isinstance(text, str) and isinstance(view, str | None):
            shown = None if view is None else printable(view)
            return Notice(name=printable(name), text=printable(text), view=shown)
    raise TypeError(
        f"step_made appended {notice!r} to the report's notices: append Notice(name, text) of two "
        "texts, or Notice(name, text, view)"
    )


def _summary_text(answer: Any) -> str:
    """Returns a summary as it can be printed; raises TypeError where it is no text."""
    if isinstance(answer, str):
        return printable(answer)
    raise TypeError(f"summary returned {answer!r}, a {type(answer).__name__}: return a text")


def _new_metrics(own: Mapping[str, float], there: Mapping[str, float], method: str) -> Metrics:
    """Returns the metrics that an observer's method returned as numbers.

    Raises:
        ValueError: there is one of them already, which an observer must not change.
    """
    nameless = [name for name in own if not isinstance(name, str)]
    if nameless:
        raise TypeError(f"{method} returned a metric named {nameless[0]!r}, which is no text")
    own = with_printable_names(own)
    taken = [name for name in own if name in there]
    if taken:
        raise ValueError(
            f"{method} returned {', '.join(taken)}, which the step has already: an observer adds "
            "metrics under names of its own, as mine/tokens"
        )
    return {name: float(value) for name, value in own.items()}


def _stop_request(answer: Any) -> StopRequest | None:
    """Returns what `wants_to_stop` answered.

    Raises:
        TypeError: it is no reason with an exit code, and not None.
    """
    if answer is None:
        return None
    if isinstance(answer, tuple) and len(answer) == 2:
        reason, exit_code = answer
        if isinstance(reason, str) and type(exit_code) is int:
            return StopRequest(printable(reason), exit_code)
    raise TypeError(
        f"wants_to_stop returned {answer!r}: return StopRequest(reason, exit_code), or None"
    )
