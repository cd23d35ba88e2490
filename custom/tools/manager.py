"""Turns with tools: all calls of one text of the model's, executed in order, become one observation.

Invariant: a turn executes at most MAX_CALLS calls and none behind the end of the episode, and its observation keeps to
`max_observation_chars`.
"""

from dataclasses import dataclass, field
from typing import Any

from custom.env import MAX_OBSERVATION_CHARS, Observation, StepResult, check_observation, cut_middle, step_environment
from custom.tools.parsers import ActionParser, ToolCall
from custom.tools.registry import CallRecord, ToolRegistry

# Of one turn.
MAX_CALLS = 32


@dataclass(frozen=True)
class ToolTurn:
    """Holds what came of one text of the model's.

    Attributes:
        observation, reward, done, info: as an environment's step; rewards of several calls are summed.
        calls: those executed, in order.
    """

    observation: Observation
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    calls: tuple[CallRecord, ...] = ()


@dataclass(frozen=True)
class MultiTurnManager:
    """Executes the calls in a model's texts.

    Every call of a text is executed, in order, up to MAX_CALLS and until one of them ends the episode. The results are
    the observation. A text without a call goes to the environment; where there is none it is the final answer.
    """

    registry: ToolRegistry
    parser: ActionParser
    environment: Any = None
    max_observation_chars: int = MAX_OBSERVATION_CHARS

    def step(self, text: str) -> ToolTurn:
        """Plays one text; raises only what the environment raises."""
        calls = self.parser.parse(text)
        if calls:
            return self._execute(calls)
        if self.environment is None:
            return ToolTurn("there is no tool call in this text", done=True)
        return ToolTurn(*step_environment(self.environment, text, self.max_observation_chars))

    def _execute(self, calls: list[ToolCall]) -> ToolTurn:
        records: list[CallRecord] = []
        info: dict[str, Any] = {}
        reward, done = 0.0, False
        for call in calls[:MAX_CALLS]:
            record = self.registry.execute(call, self.environment, self.max_observation_chars)
            records.append(record)
            if isinstance(record.value, StepResult):
                reward, done, info = reward + record.value.reward, record.value.done, info | record.value.info
            if done:
                break
        skipped = 0 if done else len(calls) - len(records)
        notes = [f"{skipped} more calls were not executed: a turn may have {MAX_CALLS}."] if skipped else []
        told = records[0].observation if len(records) == 1 and not notes else _numbered(records, notes)
        observation = check_observation(told, "the tools", self.max_observation_chars)
        return ToolTurn(observation, reward, done, info, tuple(records))


def _numbered(records: list[CallRecord], notes: list[str]) -> str:
    """Writes several results as one text, each under its call's number and name, and the notes behind them."""
    results = [f"[{i}] {cut_middle(r.call.name, 100) or 'call'}: {r.result}" for i, r in enumerate(records, 1)]
    return "\n".join(results + notes)
