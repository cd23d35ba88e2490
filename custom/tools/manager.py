"""Turns with tools: all calls of one text of the model's, executed in order, become one observation.

Invariant: a turn executes at most `max_calls` calls and none behind the end of the episode, its observation keeps to
`max_observation_chars`, and every call is counted, those that were not executed as skipped.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from custom.env import (
    MAX_OBSERVATION_CHARS,
    Observation,
    StepResult,
    check_observation,
    cut_middle,
    step_environment,
)
from custom.tools.parsers import ActionParser, ToolCall
from custom.tools.registry import CallRecord, ToolRegistry

# Of one turn.
MAX_CALLS = 32

NO_CALL = CallRecord(
    call=ToolCall(""),
    name="",
    value=None,
    error_kind="no_call",
    observation="there is no tool call in this text",
    seconds=0.0,
)


@dataclass(frozen=True)
class ToolTurn:
    """Holds what came of one text of the model's.

    Attributes:
        text: what the model wrote.
        observation, reward, done, info: as an environment's step; rewards of several calls are summed.
        calls: those executed, in order.
        seen: the observation that the model answered, where the caller gave it.
    """

    text: str
    observation: Observation
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    calls: tuple[CallRecord, ...] = ()
    seen: Observation | None = None

    @property
    def tool_call(self) -> CallRecord:
        """Returns the first call; where there was none, a record whose `result` says so."""
        return self.calls[0] if self.calls else NO_CALL


class MultiTurnManager:
    """Executes the calls in a model's texts, and keeps count of them.

    Every call of a text is executed, in order, up to `max_calls` and until one of them ends the episode. The results
    are the observation. A text without a call goes to the environment; where there is none it is the final answer.
    """

    def __init__(
        self,
        registry: ToolRegistry,
        parser: ActionParser,
        environment: Any = None,
        *,
        max_calls: int = MAX_CALLS,
        max_observation_chars: int = MAX_OBSERVATION_CHARS,
    ) -> None:
        self.registry, self.parser, self.environment = registry, parser, environment
        self.max_calls, self.max_observation_chars = max_calls, max_observation_chars
        self._turns = self._skipped = 0
        self._total_reward = 0.0
        self._tools: dict[str, dict[str, Any]] = {}

    def step(self, text: str, observation: Observation | None = None) -> ToolTurn:
        """Plays one text, which answers `observation`; raises only what the environment raises."""
        calls = self.parser.parse(text)
        turn = self._execute(text, calls, observation) if calls else self._without_call(text, observation)
        self._turns += 1
        self._total_reward += turn.reward
        return turn

    def summary(self) -> dict[str, Any]:
        """Returns statistics of all turns so far: {"turns", "calls", "failures", "total_reward", "skipped", "tools"}.

        "tools" has for each tool {"calls", "failures": {kind: count}, "seconds"}; UNKNOWN stands for all others.
        """
        failures = sum((tool["failures"] for tool in self._tools.values()), Counter[str]())
        return {
            "turns": self._turns,
            "calls": sum(tool["calls"] for tool in self._tools.values()),
            "failures": dict(failures),
            "total_reward": self._total_reward,
            "skipped": self._skipped,
            "tools": {name: {**tool, "failures": dict(tool["failures"])} for name, tool in self._tools.items()},
        }

    def _without_call(self, text: str, seen: Observation | None) -> ToolTurn:
        if self.environment is None:
            return ToolTurn(text, NO_CALL.result, done=True, seen=seen)
        return ToolTurn(text, *step_environment(self.environment, text, self.max_observation_chars), seen=seen)

    def _execute(self, text: str, calls: list[ToolCall], seen: Observation | None) -> ToolTurn:
        records: list[CallRecord] = []
        info: dict[str, Any] = {}
        reward, done = 0.0, False
        for call in calls[: self.max_calls]:
            record = self.registry.execute(call, self.environment, self.max_observation_chars)
            self._count(record)
            records.append(record)
            if isinstance(record.value, StepResult):
                reward, done, info = reward + record.value.reward, record.value.done, info | record.value.info
            if done:
                break
        skipped = len(calls) - len(records)
        self._skipped += skipped
        cut = skipped and not done
        notes = [f"{skipped} more calls were not executed: a turn may have {self.max_calls}."] if cut else []
        told = records[0].observation if len(records) == 1 and not notes else _numbered(records, notes)
        observation = check_observation(told, "the tools", self.max_observation_chars)
        return ToolTurn(text, observation, reward, done, info, tuple(records), seen)

    def _count(self, record: CallRecord) -> None:
        tool = self._tools.setdefault(record.name, {"calls": 0, "failures": Counter(), "seconds": 0.0})
        tool["calls"] += 1
        tool["seconds"] += record.seconds
        if not record.ok:
            tool["failures"][record.error_kind] += 1


def _numbered(records: list[CallRecord], notes: list[str]) -> str:
    """Writes several results as one text, each under its call's number and name, and the notes behind them."""
    results = [f"[{i}] {cut_middle(r.call.name, 100) or 'call'}: {r.result}" for i, r in enumerate(records, 1)]
    return "\n".join(results + notes)
