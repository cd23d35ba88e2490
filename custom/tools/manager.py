"""Turns with tools: all calls of one text of the model's, executed in order, become one observation.

Invariant: a turn executes at most MAX_CALLS calls and none behind the end of the episode, and its observation keeps to
`max_observation_chars`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from custom.env import MAX_OBSERVATION_CHARS, Observation, StepResult, check_observation, cut_middle, step_environment
from custom.tools.parsers import ActionParser, ToolCall
from custom.tools.registry import UNKNOWN, CallRecord, ToolRegistry

# Of one turn.
MAX_CALLS = 32
NO_CALL = "there is no tool call in this text"


@dataclass(frozen=True)
class ToolTurn:
    """Holds what came of one text of the model's.

    Attributes:
        observation, reward, done, info: as an environment's step; rewards of several calls are summed.
        calls: those executed, in order.
        text: the model's.
        seen: the observation that it answered, where the caller gave it.
    """

    observation: Observation
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    calls: tuple[CallRecord, ...] = ()
    text: str = ""
    seen: Observation = ""

    @property
    def tool_call(self) -> CallRecord:
        """Returns the first call; where the text has none, a failed one whose result says so."""
        return self.calls[0] if self.calls else CallRecord(ToolCall(""), UNKNOWN, None, "no_call", NO_CALL, 0.0)


@dataclass(frozen=True)
class EpisodeSummary(Sequence[str]):
    """Holds what came of an episode; it iterates as the model's responses.

    Attributes:
        turns: a ToolTurn each; of an episode in an environment what the rollout keeps of a turn.
        tool_statistics: per tool its `calls`, `failures` and `seconds` (in all).
        ending: how it ended, "done" where the environment or a tool said so; empty while it goes on.
    """

    responses: list[str]
    turns: list[Any]
    tool_statistics: dict[str, dict[str, float]]
    total_reward: float
    ending: str

    def __getitem__(self, index: Any) -> Any:
        return self.responses[index]

    def __len__(self) -> int:
        return len(self.responses)


def tool_statistics(calls: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Counts the records of calls (name, ok, seconds) by tool; see EpisodeSummary."""
    found: dict[str, dict[str, float]] = {}
    for call in calls:
        of = found.setdefault(call["name"], {"calls": 0, "failures": 0, "seconds": 0.0})
        of["calls"] += 1
        of["failures"] += not call["ok"]
        of["seconds"] += call["seconds"]
    return found


@dataclass(eq=False)
class MultiTurnManager:
    """Executes the calls in a model's texts, and keeps the turns.

    Every call of a text is executed, in order, up to MAX_CALLS and until one of them ends the episode. The results are
    the observation. A text without a call goes to the environment; where there is none it is the final answer.
    """

    registry: ToolRegistry
    parser: ActionParser
    environment: Any = None
    max_observation_chars: int = MAX_OBSERVATION_CHARS
    turns: list[ToolTurn] = field(default_factory=list, init=False)

    def step(self, text: str, observation: Observation = "") -> ToolTurn:
        """Plays one text, which answers an observation; raises only what the environment raises."""
        self.turns.append(replace(self._play(text), text=text, seen=observation))
        return self.turns[-1]

    def summary(self) -> EpisodeSummary:
        """Returns what came of the turns so far."""
        calls = [record.facts() for turn in self.turns for record in turn.calls]
        responses, ending = [turn.text for turn in self.turns], "done" if self.turns and self.turns[-1].done else ""
        paid = sum(turn.reward for turn in self.turns)
        return EpisodeSummary(responses, list(self.turns), tool_statistics(calls), paid, ending)

    def _play(self, text: str) -> ToolTurn:
        calls = self.parser.parse(text)
        if calls:
            return self._execute(calls)
        if self.environment is None:
            return ToolTurn(NO_CALL, done=True)
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
        # Each under its call's number and name.
        results = [f"[{i}] {cut_middle(r.call.name, 100) or 'call'}: {r.result}" for i, r in enumerate(records, 1)]
        told = records[0].observation if len(records) == 1 and not notes else "\n".join(results + notes)
        observation = check_observation(told, "the tools", self.max_observation_chars)
        return ToolTurn(observation, reward, done, info, tuple(records))
