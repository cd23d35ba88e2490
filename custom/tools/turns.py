"""Turns of calls: the calls in one text of the model's are executed, their results are observed.

Invariant: a turn executes at most MAX_CALLS calls and none behind the end of the episode; it raises
only what the environment raises.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from custom.env import Message, Observation, StepResult, Task
from custom.env_calls import MAX_OBSERVATION_CHARS, check_observation, cut_middle, step_environment
from custom.tools.calls import UNKNOWN, CallRecord, ToolCall
from custom.tools.families import FamilyParser, said_in
from custom.tools.parsers import ActionParser
from custom.tools.registry import MAX_NAME_CHARS, ToolRegistry
from data.cut_text import CutText

# The most calls of one turn.
MAX_CALLS = 32
NO_CALL = "there is no tool call in this text"


@dataclass(frozen=True)
class ToolTurn:
    """Holds what came of one text of the model's.

    Attributes:
        observation, reward, done, info: as an environment's step; rewards of several calls are
            summed.
        calls: those executed, in order.
        text: the model's.
    """

    observation: Observation
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    calls: tuple[CallRecord, ...] = ()
    text: str = ""

    @property
    def tool_call(self) -> CallRecord:
        """Returns the first call; where the text has none, a failed one whose result says so."""
        if self.calls:
            return self.calls[0]
        return CallRecord(
            call=ToolCall(""),
            name=UNKNOWN,
            value=None,
            error_kind="no_call",
            observation=NO_CALL,
            seconds=0.0,
        )


class EpisodeSummary(list[str]):
    """Holds what came of an episode; it is the list of the model's responses.

    Attributes:
        turns: a ToolTurn each; of an episode in an environment what the rollout keeps of a turn.
        total_reward: the sum over the turns.
        tool_statistics: per tool its `calls`, `failures` and `seconds` (in all).
        ending: how it ended, "done" where the environment or a tool ended it; empty while it goes
            on.
    """

    def __init__(
        self,
        turns: Sequence[Any],
        calls: Iterable[Mapping[str, Any]],
        total_reward: float,
        ending: str,
    ) -> None:
        super().__init__(turn.text for turn in turns)
        self.turns = list(turns)
        self.total_reward = total_reward
        self.ending = ending
        self.tool_statistics: dict[str, dict[str, float]] = {}
        for call in calls:
            self._count(call)

    def _count(self, call: Mapping[str, Any]) -> None:
        statistics = self.tool_statistics.setdefault(
            call["name"], {"calls": 0, "failures": 0, "seconds": 0.0}
        )
        statistics["calls"] += 1
        if not call["ok"]:
            statistics["failures"] += 1
        statistics["seconds"] += call["seconds"]


@dataclass(eq=False)
class MultiTurnManager:
    """Executes the calls in a model's texts, and keeps the turns.

    Every call of a text is executed, in order, up to MAX_CALLS and until one of them ends the
    episode; of a CutText those that are finished. The results are the observation. A text without a
    call goes to the environment; where there is none it is the final answer.
    """

    registry: ToolRegistry
    parser: ActionParser
    environment: Any = None
    max_observation_chars: int = MAX_OBSERVATION_CHARS
    turns: list[ToolTurn] = field(default_factory=list, init=False)

    def begin_episode(self, task: Task | None = None) -> None:
        """Forgets the turns of the episode before, and tells the tools which task begins."""
        self.turns.clear()
        self.registry.begin_episode(task or {}, self.environment)

    def step(self, text: str, observation: Observation = "") -> ToolTurn:
        """Plays one text, which answers an observation; raises only what the environment raises."""
        turn = replace(self._play(text), text=text)
        self.turns.append(turn)
        return turn

    def summary(self) -> EpisodeSummary:
        """Returns what came of the turns so far."""
        return EpisodeSummary(
            turns=self.turns,
            calls=[record.as_info() for turn in self.turns for record in turn.calls],
            total_reward=sum(turn.reward for turn in self.turns),
            ending="done" if self.turns and self.turns[-1].done else "",
        )

    def _play(self, text: str) -> ToolTurn:
        calls = [
            call
            for call in calls_of(text, self.parser)
            if call.name in self.registry.tools or not call.may_be_text
        ]
        if calls:
            return self._execute(calls)
        if self.environment is None:
            return ToolTurn(NO_CALL, done=True)
        said = said_in(text, self.parser)
        step = step_environment(self.environment, said, self.max_observation_chars)
        return ToolTurn(
            observation=step.observation, reward=step.reward, done=step.done, info=step.info
        )

    def _execute(self, calls: list[ToolCall]) -> ToolTurn:
        records: list[CallRecord] = []
        reward = 0.0
        done = False
        info: dict[str, Any] = {}
        for call in calls[:MAX_CALLS]:
            record = self.registry.execute(call, self.environment, self.max_observation_chars)
            records.append(record)
            if isinstance(record.value, StepResult):
                reward += record.value.reward
                done = record.value.done
                info |= record.value.info
            if done:
                break
        over_limit = 0 if done else len(calls) - len(records)
        joined = _join_results(records, over_limit)
        if isinstance(self.parser, FamilyParser) and self.parser.facts.results_as_tool:
            joined = _result_messages(records, calls[len(records) :], self.parser)
        observation = check_observation(joined, "the tools", self.max_observation_chars)
        return ToolTurn(
            observation=observation, reward=reward, done=done, info=info, calls=tuple(records)
        )


def calls_of(text: str, parser: ActionParser) -> list[ToolCall]:
    """Reads a turn's calls; of a turn that a limit cut, those that are not finished say so."""
    return parser.parse_cut(text) if isinstance(text, CutText) else parser.parse(text)


def _result_messages(
    records: list[CallRecord], left: list[ToolCall], parser: FamilyParser
) -> Observation:
    """Returns a message of the role `tool` for each call that could be read.

    The others are told of in a user's message behind them: no template takes a result without its
    call.

    Args:
        left: the calls that were not executed, since a turn may have MAX_CALLS.
    """
    results: list[Message] = []
    faults: list[str] = []
    not_executed = f"Error: this call was not executed: a turn may have {MAX_CALLS}"
    told = [(record.call, record.result) for record in records]
    told += [(call, not_executed) for call in left]
    for call, text in told:
        if call.error_kind:
            faults.append(text)
            continue
        call_id = parser.call_id(call, len(results))
        results.append(
            {"role": "tool", "content": text, "name": call.name, "tool_call_id": call_id}
        )
    if faults:
        results.append({"role": "user", "content": "\n".join(faults)})
    return results


def _join_results(records: list[CallRecord], over_limit: int) -> Observation:
    """Returns the observation of a turn; of several calls each under its number and name.

    Args:
        records: of the calls that were executed.
        over_limit: how many calls were not, since a turn may have MAX_CALLS.
    """
    if len(records) == 1 and not over_limit:
        return records[0].observation
    lines = []
    for number, record in enumerate(records, 1):
        name = cut_middle(record.call.name, MAX_NAME_CHARS) or "call"
        lines.append(f"[{number}] {name}: {record.result}")
    if over_limit:
        lines.append(f"{over_limit} more calls were not executed: a turn may have {MAX_CALLS}.")
    return "\n".join(lines)
