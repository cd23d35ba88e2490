"""Turns."""

import json
import time
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
from custom.tools.registry import Outcome, ToolRegistry, guarded

MAX_CALLS = 32  # per turn


UNKNOWN = "(unknown)"  # what calls of no registered tool are counted under: a model's inventions are no metric's names


@dataclass(frozen=True)
class CallRecord:
    """One executed call, as metrics count it: `name` is a registered tool's, or UNKNOWN.

    `requested` is the name that the model wrote, `result` what it is told, `seconds` the time until then.
    """

    name: str
    ok: bool
    error_kind: str
    seconds: float
    result: str = ""
    requested: str = ""
    arguments: dict[str, Any] | str = field(default_factory=dict)


NO_CALL = CallRecord("", False, "no_call", 0.0, result="there is no tool call in this text")


@dataclass(frozen=True)
class ToolTurn:
    """What came of one text of the model's; `calls` are those executed, in order."""

    text: str
    observation: Observation
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    calls: tuple[CallRecord, ...] = ()
    seen: Observation | None = None  # the observation that the model answered, where the caller gave it

    @property
    def tool_call(self) -> CallRecord:
        """The first call; where there was none, a record whose `result` says so."""
        return self.calls[0] if self.calls else NO_CALL


class MultiTurnManager:
    """Executes the calls in a model's texts, and keeps count of them.

    Every call of a text is executed, in order, up to `max_calls` and until one of them ends the episode. The results are
    the observation. A text without a call goes to the environment; where there is none it is the final answer.
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
        self._turns = 0
        self._total_reward = 0.0
        self._skipped = 0
        self._calls: Counter[str] = Counter()
        self._failures: dict[str, Counter[str]] = {}
        self._seconds: Counter[str] = Counter()

    def step(self, text: str, observation: Observation | None = None) -> ToolTurn:
        """Plays one text, which answers `observation`; raises only what the environment raises."""
        calls = self.parser.parse(text)
        turn = self._execute(text, calls, observation) if calls else self._without_call(text, observation)
        self._turns += 1
        self._total_reward += turn.reward
        return turn

    def summary(self) -> dict[str, Any]:
        """Statistics of all turns so far: {"turns", "calls", "failures", "total_reward", "skipped", "tools"}.

        "tools" has for each tool {"calls", "failures": {kind: count}, "seconds"}; UNKNOWN stands for all others.
        """
        tools = {
            name: {"calls": count, "failures": dict(self._failures.get(name, {})), "seconds": self._seconds[name]}
            for name, count in self._calls.items()
        }
        failures = sum((kinds for kinds in self._failures.values()), Counter[str]())
        return {
            "turns": self._turns,
            "calls": self._calls.total(),
            "failures": dict(failures),
            "total_reward": self._total_reward,
            "skipped": self._skipped,
            "tools": tools,
        }

    def _without_call(self, text: str, seen: Observation | None) -> ToolTurn:
        if self.environment is None:
            return ToolTurn(text, NO_CALL.result, done=True, seen=seen)
        result = step_environment(self.environment, text, self.max_observation_chars)
        return ToolTurn(text, result.observation, result.reward, result.done, result.info, seen=seen)

    def _execute(self, text: str, calls: list[ToolCall], seen: Observation | None) -> ToolTurn:
        records: list[CallRecord] = []
        observations: list[Observation] = []
        info: dict[str, Any] = {}
        reward, done = 0.0, False
        for call in calls[: self.max_calls]:
            started = time.perf_counter()
            outcome = self.registry.execute(call, self.environment, self.max_observation_chars)
            value = outcome.value
            if isinstance(value, StepResult):
                reward, done, info = reward + value.reward, value.done, {**info, **value.info}
                shown = value.observation
            else:
                shown = _text_of(value) if outcome.ok else f"Error ({outcome.error_kind}): {value}"
            shown = check_observation(shown, f"tool {call.name}", self.max_observation_chars)
            records.append(self._record(call, outcome, _as_text(shown), time.perf_counter() - started))
            observations.append(shown)
            if done:
                break
        if skipped := len(calls) - len(records):
            self._skipped += skipped
            if not done:
                observations.append(f"{skipped} more calls were not executed: a turn may have {self.max_calls}.")
        whole = observations[0] if len(observations) == 1 else _numbered(records, observations)
        whole = check_observation(whole, "the tools", self.max_observation_chars)
        return ToolTurn(text, whole, reward, done, info, tuple(records), seen)

    def _record(self, call: ToolCall, outcome: Outcome, result: str, seconds: float) -> CallRecord:
        name = call.name if call.name in self.registry else UNKNOWN
        self._calls[name] += 1
        self._seconds[name] += seconds  # type: ignore[assignment]  # a Counter of floats
        if not outcome.ok:
            self._failures.setdefault(name, Counter())[outcome.error_kind] += 1
        return CallRecord(
            name, outcome.ok, outcome.error_kind, seconds, result, cut_middle(call.name, 100), call.arguments
        )


def _text_of(value: Any) -> str:
    """Text as it is, None as empty, anything else as JSON, else as str shows it."""
    if value is None or isinstance(value, str):
        return value or ""
    as_json = guarded(lambda: json.dumps(value, ensure_ascii=False))
    return as_json.value if as_json.ok else guarded(lambda: str(value)).value


def _as_text(observation: Observation) -> str:
    return observation if isinstance(observation, str) else "\n".join(message["content"] for message in observation)


def _numbered(records: list[CallRecord], observations: list[Observation]) -> str:
    """Several results as one text, each under its call's number and name."""
    titles = [f"[{i}] {record.requested or 'call'}: " for i, record in enumerate(records, 1)]
    titles += [""] * (len(observations) - len(titles))
    return "\n".join(title + _as_text(shown) for title, shown in zip(titles, observations, strict=True))
