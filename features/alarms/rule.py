"""Registers rules and their alarms: an alarm stands in one place, above the rule that rings it.

    @rule("group_size", advice="uid of the rows, and what drops or adds them", order=90)
    def uneven_groups(seen: SeenStep) -> Iterator[Finding]:
        ...
        yield Finding("group_size", "2 of 8 groups have not 4 episodes, ...")

A rule that rings several alarms has several such lines. A rule that remembers earlier steps is a
method of a `RulesWithMemory`. Rules that make sense under a condition alone, as with a dataset, ask
for it themselves. Invariant: each alarm is described once, at one of the rules that ring it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from features.alarms.finding import Finding
from training.observers import ObservedRun

# Takes a `SeenStep`, and what it is a method of.
RuleFunction = TypeVar("RuleFunction", bound=Callable[..., Iterator[Finding]])
# The order of rules that say nothing of it: behind all others.
LAST = 1000


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Describes an alarm.

    Attributes:
        name: what it is called in log lines, and in the metrics as alarms/NAME.
        advice: what to check when it rings.
        waits: it may be chance, or pass: it must stand for two steps before it rings.
        view: the filters of the viewer's list that show what it says; "": the step's episodes.
        of_any_step: its episodes are those of every step, and not of the one in which it rang.
        color: how the tokens of an episode are coloured that it names; "": as the viewer does.
        settings: ends of keys whose change may be its direct cause. Where a run goes on with others
            of them, it names the change, is told before all others, and waits for no second step.
    """

    name: str
    advice: str
    waits: bool = False
    view: str = ""
    of_any_step: bool = False
    color: str = ""
    settings: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Rule:
    """Holds a registered rule.

    Attributes:
        function: what looks at a step.
        alarms: the names of those that it may ring.
        order: smaller ones run, and are told, first.
        owner: the class that it is a method of.
    """

    function: Callable[..., Iterator[Finding]]
    alarms: set[str] = field(default_factory=set)
    order: int = LAST
    owner: type[RulesWithMemory] | None = None

    @property
    def name(self) -> str:
        """Returns the function's name."""
        return self.function.__name__


ALARMS: dict[str, Alarm] = {}
RULES: dict[Callable[..., Iterator[Finding]], Rule] = {}


def rule(
    alarm: str,
    *,
    advice: str | None = None,
    waits: bool = False,
    view: str = "",
    of_any_step: bool = False,
    color: str = "",
    settings: tuple[str, ...] = (),
    order: int | None = None,
) -> Callable[[RuleFunction], RuleFunction]:
    """Registers a function, or a method, as a rule that may ring an alarm.

    Args:
        alarm: its name; the other arguments but the last are those of `Alarm`.
        advice: None: another rule that rings the alarm too describes it.
        order: of the rule; smaller ones run, and are told, first. If several rules ring an alarm,
            the first one's finding is told. None: as another line of the rule says, or last.

    Raises:
        ValueError: the alarm is described already.
    """
    if advice is not None:
        if alarm in ALARMS:
            raise ValueError(
                f"the alarm {alarm!r} is described twice: give advice at one of its rules alone"
            )
        ALARMS[alarm] = Alarm(
            name=alarm,
            advice=advice,
            waits=waits,
            view=view,
            of_any_step=of_any_step,
            color=color,
            settings=settings,
        )

    def register(function: RuleFunction) -> RuleFunction:
        registered = RULES.setdefault(function, Rule(function=function))
        registered.alarms.add(alarm)
        if order is not None:
            registered.order = order
        return function

    return register


class RulesWithMemory:
    """Holds rules that remember earlier steps; those of its methods that `rule` registers.

    Args:
        run: what is known of the run.
    """

    #: what a checkpoint keeps their state by; "": they have none that outlives the process
    name = ""

    def __init__(self, run: ObservedRun) -> None:
        self.run = run

    def __init_subclass__(cls) -> None:
        """Says to the class's rules whose methods they are."""
        super().__init_subclass__()
        for value in vars(cls).values():
            if callable(value) and value in RULES:
                RULES[value].owner = cls

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`; an older one may lack parts."""
