"""Runs the rules after every step and says what they find.

What stands for as many steps as its rule waits is said once, again each time it has stood twice as
long, and is counted in the metrics as alarms/NAME. Invariant: rules read and never write, so that a
run with and without them has the same numbers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor

from data.protocol import DataProto
from features.alarms.catalogue import rules_in_order, view_of
from features.alarms.changed_settings import ChangedSettings
from features.alarms.finding import Finding
from features.alarms.rule import ALARMS, Rule, RulesWithMemory
from features.alarms.seen_step import History, Metrics, SeenStep
from features.alarms.settings import AlarmSettings
from training.batch.episode_rows import EpisodeRows
from training.observers import Notice, ObservedRun, Observer, StepReport, StopRequest
from training.run.exit_codes import MEND

# The package's own name, as it is what users know.
logger = logging.getLogger("features.alarms")
# What a checkpoint keeps the last steps' metrics by, beside the names of rules.
HISTORY = "history"


def open_alarms(run: ObservedRun) -> Alarms | None:
    """Opens the alarms of a run; None where it wants none."""
    if run.config.section(AlarmSettings).mode == "off":
        return None
    return Alarms(run)


class Alarms(Observer):
    """Watches a run's steps.

    Args:
        run: the run; `alarms.mode` says what an alarm does.

    Attributes:
        standing: the alarms that stand, as sentences.
    """

    def __init__(self, run: ObservedRun) -> None:
        self.run = run
        settings = run.config.section(AlarmSettings)
        self.stops = settings.mode == "stop"
        self.ignored = set(settings.ignore)
        self.history = History()
        self.rules = rules_in_order()
        # Rules, and states of rules, that raised: each is named once.
        self.broken_rules: set[str] = set()
        self.memories: dict[type[RulesWithMemory], RulesWithMemory] = {}
        for owner in dict.fromkeys(rule.owner for rule in self.rules if rule.owner is not None):
            with self._costing_itself(owner.__name__):
                self.memories[owner] = owner(run)
        # The step since which each finding stands.
        self.since: dict[str, int] = {}
        self.standing: list[str] = []
        self.changes = ChangedSettings(run)
        # The step whose update goes on, and what its rows were given, (B,) float64.
        self._step: int | None = None
        self._given: Tensor | None = None

    def run_started(self, step: int, in_flight: Sequence[int]) -> None:
        """Notes behind which step the run goes on, perhaps with other settings."""
        self.changes.begin(step)

    def update_begins(self, batch: DataProto) -> None:
        """Notes the step, whose scores are to come."""
        self._step = batch.meta_info.get("global_steps")

    def scored(self, batch: DataProto, scores: Tensor) -> None:
        """Sees what a step's rows were given, (B, R), before anything is made of it."""
        info = batch.meta_info
        # With dynamic sampling another step's may come in between.
        if not info.get("validate") and info.get("global_steps") == self._step:
            self._given = scores.sum(1, dtype=torch.float64)

    def step_made(self, report: StepReport) -> dict[str, float]:
        """Looks at a step.

        Returns: `alarms/count`, and alarms/NAME: for how many steps each stands.
        """
        began = time.perf_counter()
        step = report.step
        metrics = {**report.metrics, "perf/driver_memory_gib": driver_memory()}
        found = self._run_rules(report, metrics)
        found = {alarm: each for alarm, each in found.items() if alarm not in self.ignored}
        causes = {alarm: self.changes.behind(ALARMS[alarm], step) for alarm in found}
        # What a change of settings caused is told first: other alarms may come of it.
        order = sorted(found, key=lambda alarm: not causes[alarm])
        findings = {alarm: found[alarm] for alarm in order}
        self.history.add(metrics)
        self.since = {alarm: self.since.get(alarm, step) for alarm in findings}
        self.standing = []
        results: dict[str, float] = {}
        for alarm, finding in findings.items():
            steps_standing = step - self.since[alarm] + 1
            steps_due = steps_standing
            if ALARMS[alarm].waits and not causes[alarm]:
                steps_due -= 1
            if steps_due == 0:
                continue
            results[f"alarms/{alarm}"] = float(steps_standing)
            cause = f"; {causes[alarm]}" if causes[alarm] else ""
            sentence = (
                f"alarm {alarm}: {finding.text}, since step {self.since[alarm]}{cause}; check "
                f"{finding.advice or ALARMS[alarm].advice}"
            )
            self.standing.append(sentence)
            is_power_of_two = steps_due & (steps_due - 1) == 0
            if is_power_of_two:
                logger.warning("%s", sentence)
                report.notices.append(Notice(alarm, sentence, view_of(finding, step)))
        results["alarms/count"] = float(len(self.standing))
        results["timing_s/alarms"] = time.perf_counter() - began
        return results

    def wants_to_stop(self) -> StopRequest | None:
        """Ends the run where an alarm stands and `alarms.mode` is stop."""
        if not (self.standing and self.stops):
            return None
        advice = "alarms.mode=stop ends the run; warn goes on all the same"
        return StopRequest("\n".join([*self.standing, advice]), MEND)

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: what the rules remember, by their names."""
        state: dict[str, Any] = {}
        for owner, memory in self.memories.items():
            if memory.name:
                with self._costing_itself(f"state of {owner.__name__}"):
                    state[memory.name] = memory.state_dict()
        history = self.history.state()
        if history:
            state[HISTORY] = history
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`, or from what older versions wrote."""
        state = in_todays_form(state)
        # Older versions kept no metrics.
        for metrics in state.get(HISTORY, []):
            self.history.add(metrics)
        for owner, memory in self.memories.items():
            if memory.name in state:
                with self._costing_itself(f"state of {owner.__name__}"):
                    memory.load_state_dict(state[memory.name])

    def _run_rules(self, report: StepReport, metrics: Metrics) -> dict[str, Finding]:
        """Returns each alarm's first finding, by alarm."""
        batch = report.batch
        seen = SeenStep(
            run=self.run,
            step=report.step,
            batch=batch,
            updated=batch if report.updated is None else report.updated,
            episodes=EpisodeRows(batch),
            metrics=metrics,
            history=self.history,
            given=self._given,
        )
        self._given = None
        findings: dict[str, Finding] = {}
        for rule in self.rules:
            if rule.owner is not None and rule.owner not in self.memories:
                # Its owner could not be made, which was said.
                continue
            with self._costing_itself(rule.name):
                for finding in self._findings(rule, seen):
                    findings.setdefault(finding.alarm, finding)
        return findings

    @contextmanager
    def _costing_itself(self, name: str) -> Iterator[None]:
        """Keeps what a rule raises in the block from the others, and says so once.

        An edit of the run may lack or hold anything: a batch, a metric, a schedule.
        """
        try:
            yield
        except Exception as error:
            if name not in self.broken_rules:
                logger.warning(
                    "alarms do without the rule %s: %s: %s", name, type(error).__name__, error
                )
            self.broken_rules.add(name)

    def _findings(self, rule: Rule, seen: SeenStep) -> Iterator[Finding]:
        """Runs a rule.

        Raises:
            ValueError: it rings an alarm that it does not name.
        """
        if rule.owner is None:
            found = rule.function(seen)
        else:
            found = rule.function(self.memories[rule.owner], seen)
        for finding in found:
            if finding.alarm not in rule.alarms:
                raise ValueError(
                    f"{rule.name} rings {finding.alarm!r}; its @rule lines name "
                    f"{', '.join(sorted(rule.alarms))}: add one"
                )
            yield finding


def driver_memory() -> float:
    """Measures the memory of this process, in GiB."""
    return psutil.Process().memory_info().rss / 2**30


def in_todays_form(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a checkpoint's state by the names of rules.

    Older versions kept template, rewards, spread and fewest_cut side by side, and the oldest ones
    the first two alone.
    """
    if "template" not in state:
        return state
    rewards = {"sources": state["rewards"]}
    if "spread" in state:
        rewards["spread"] = state["spread"]
    lengths = {}
    if "fewest_cut" in state:
        lengths["fewest_cut"] = state["fewest_cut"]
    return {"engine": {"template": state["template"]}, "rewards": rewards, "lengths": lengths}
