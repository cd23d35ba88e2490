"""What a tool is, the tools that a model may call, by name, and turns of calls, whose results are one observation.

Last comes the way from the names in `agent.tools` to a registry, also of tools written for verl: every registry gets
tools of its own, so that no two agents share one's state.

A tool knows nothing of parsers, counts or turns; it gets arguments by name, and returns or raises. A turn executes at
most MAX_CALLS calls and none behind the end of the episode. Invariant: no call raises, whatever the model wrote and
whatever a tool did. A call that fails becomes an observation that says why, under one of five kinds: unknown_tool,
bad_json, bad_arguments, exception, timeout. Only the environment's own failures pass through, since they end the
episode.
"""

import asyncio
import copy
import inspect
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any, NamedTuple, Self

from omegaconf import OmegaConf

from custom import env
from custom.env import MAX_OBSERVATION_CHARS, Observation, StepResult
from custom.tools.parsers import ActionParser, ErrorKind, ToolCall
from data.loading import load_object
from data.texts import say, table

__all__ = [
    "BUILTIN_TOOLS",
    "UNKNOWN",
    "BaseTool",
    "CallRecord",
    "EnvironmentStepTool",
    "EpisodeSummary",
]
__all__ += [
    "MultiTurnManager",
    "Tool",
    "ToolDefinition",
    "ToolError",
    "ToolRegistry",
    "ToolResponse",
    "ToolTurn",
]
__all__ += ["load_tools"]


class ToolError(Exception):
    """Fails a call with exactly this text; raised by a tool."""


@dataclass(frozen=True)
class ToolDefinition:
    """Says what the model is told of a tool.

    Args:
        name: unlike all others'.
        description: for the model.
        parameters: a JSON schema of an object; arguments are checked against it before the tool sees them.
        timeout_s: seconds after which a call counts as failed; None: the tool sees to it itself.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    timeout_s: float | None = None

    def schema(self) -> dict[str, Any]:
        """Returns the function schema as OpenAI writes it, which chat templates take as `tools=`."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}


def definition_of(name: str) -> ToolDefinition:
    """Returns the definition of a tool that comes along, as definitions.yaml has it."""
    return ToolDefinition(name, **table(__file__, "definitions")[name])


class Tool(ABC):
    """Answers calls of the model: it has a `definition`, and `execute` gets the arguments by name.

    class Echo(Tool):
        definition = ToolDefinition("echo", "Echoes.", {"type": "object", "properties": {"text": {"type": "string"}}})

        def execute(self, text: str = "") -> str:
            return text
    """

    definition: ToolDefinition

    @abstractmethod
    def execute(self, *args: Any, **arguments: Any) -> Any:
        """Gets the arguments by name and returns the observation: text, or anything that JSON can show.

        A StepResult instead brings a reward and may end the episode. Raising is fine: the model sees the message. A
        TimeoutError counts as a timeout.
        """


class EnvironmentStepTool(Tool):
    """Steps the environment as a tool call: its reward and its end count as the turn's.

    In a MultiTurnManager with an environment it is that one which is stepped, so that a copy of the tool never plays
    another episode's game; `environment` serves calls outside of it. It has no deadline of its own: the episode's
    count. A subclass with a definition of its own says in `action_text` which action its arguments stand for.
    """

    definition = definition_of("environment_step")

    def __init__(self, environment: Any = None) -> None:
        self.environment = environment

    def execute(self, **arguments: Any) -> StepResult:
        """Takes one step in its own environment."""
        if self.environment is None:
            raise ToolError("there is no environment to act in")
        return env.step_environment(self.environment, self.action_text(**arguments))

    def __deepcopy__(self, memo: object) -> Self:
        return copy.copy(self)

    def action_text(self, action: str) -> str:
        """Returns the environment's action for the model's arguments."""
        return action


# So many calls of one tool may have run into its deadline and still run; while they do it is not called again.
MAX_HANGING = 4
# What calls of no registered tool are counted under: a model's inventions are no metric's names.
UNKNOWN = "(unknown)"


class CallRecord(NamedTuple):
    """Holds what came of one call: made where it was executed, read by the turn, its user and the metrics.

    Attributes:
        call: the call as the model wrote it.
        name: a registered tool's, or UNKNOWN.
        value: what the tool returned, or the error's text.
        error_kind: empty where the call succeeded.
        observation: what the model is told.
        seconds: the time until then.
    """

    call: ToolCall
    name: str
    value: Any
    error_kind: str
    observation: Observation
    seconds: float

    @property
    def ok(self) -> bool:
        """Says whether the call succeeded."""
        return not self.error_kind

    @property
    def result(self) -> str:
        """Returns the observation as text."""
        told = self.observation
        return told if isinstance(told, str) else "\n".join(message["content"] for message in told)

    def facts(self) -> dict[str, Any]:
        """Returns what metrics count: name, ok, error_kind and seconds."""
        return {
            "name": self.name,
            "ok": self.ok,
            "error_kind": self.error_kind,
            "seconds": self.seconds,
        }


class ToolRegistry:
    """Keeps `tools` by name, and executes calls with their arguments checked."""

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self.tools: dict[str, Tool] = {}
        self._hanging: dict[str, list[Thread]] = {}
        for tool in tools:
            self.register(tool)

    def register(self, tool: Tool) -> None:
        """Adds a tool; ValueError where it has no valid definition, or its name is taken."""
        definition = getattr(tool, "definition", None)
        if (
            isinstance(tool, type)
            or not isinstance(definition, ToolDefinition)
            or not callable(tool.execute)
        ):
            who = env.located(getattr(tool, "execute", None), repr(tool))
            raise ValueError(f"{who} is no tool; give an instance of a Tool that has a definition")
        if self.tools.get(definition.name, tool) is not tool:
            raise ValueError(
                f"there is already a tool named {definition.name!r}; names must differ"
            )
        validator_of(tool)
        self.tools[definition.name] = tool

    def schemas(self) -> list[dict[str, Any]]:
        """Returns all tools as function schemas."""
        return [tool.definition.schema() for tool in self.tools.values()]

    def execute_tool(self, tool_name: str, /, **arguments: Any) -> tuple[bool, str]:
        """Executes a tool by hand; returns whether it succeeded, and what the model would be told."""
        record = self.execute(ToolCall(tool_name, arguments))
        return record.ok, record.result

    def execute(
        self, call: ToolCall, environment: Any = None, max_chars: int = MAX_OBSERVATION_CHARS
    ) -> CallRecord:
        """Executes a call; an EnvironmentStepTool steps `environment`, where one is given, and lets its errors pass.

        The observation is cut to `max_chars`.
        """
        started = time.perf_counter()
        value, error_kind = self._attempt(call, environment, max_chars)
        told = value.observation if isinstance(value, StepResult) else _as_text(value)
        told = f"Error ({error_kind}): {told}" if error_kind else told
        told = env.check_observation(told, f"tool {call.name}", max_chars)
        name, seconds = (
            call.name if call.name in self.tools else UNKNOWN,
            time.perf_counter() - started,
        )
        return CallRecord(
            call=call,
            name=name,
            value=value,
            error_kind=error_kind,
            observation=told,
            seconds=seconds,
        )

    def _attempt(self, call: ToolCall, environment: Any, max_chars: int) -> tuple[Any, ErrorKind]:
        if call.error_kind:
            return call.error, call.error_kind
        tool = self.tools.get(call.name)
        if tool is None:
            known = ", ".join(self.tools) or "none"
            return (
                f"there is no tool {env.cut_middle(call.name, 100)!r}; the tools are: {known}",
                "unknown_tool",
            )
        try:
            arguments = checked_arguments(tool, call.arguments)
        except ValueError as error:
            return f"wrong arguments for tool {call.name!r}: {error}", "bad_arguments"
        if environment is None or not isinstance(tool, EnvironmentStepTool):
            return self._run(tool, arguments)
        action, error_kind = guarded(lambda: tool.action_text(**arguments))
        return (
            (action, error_kind)
            if error_kind
            else (env.step_environment(environment, action, max_chars), "")
        )

    def _run(self, tool: Tool, arguments: dict[str, Any]) -> tuple[Any, ErrorKind]:
        def run() -> Any:
            value = tool.execute(**arguments)
            # Checked as an environment's would be.
            return env.check_step(value, "the tool") if isinstance(value, StepResult) else value

        timeout, name = tool.definition.timeout_s, tool.definition.name
        if timeout is None:
            return guarded(run)
        hanging = self._hanging[name] = [
            thread for thread in self._hanging.get(name, []) if thread.is_alive()
        ]
        if len(hanging) >= MAX_HANGING:
            return f"tool {name!r} is still busy with {len(hanging)} earlier calls", "timeout"
        answers: list[tuple[Any, ErrorKind]] = []
        thread = Thread(
            target=lambda: answers.append(guarded(run, BaseException)),
            name=f"tool-{name}",
            daemon=True,
        )
        thread.start()
        thread.join(timeout)
        if answers:
            return answers[0]
        hanging.append(thread)
        return f"tool {name!r} did not answer within {timeout:g} s", "timeout"


def validator_of(tool: Tool) -> Any:
    """Makes what checks arguments against a tool's schema; ValueError where that is none."""
    import jsonschema

    schema = tool.definition.parameters
    made = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(
        schema
    )
    try:
        made.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(
            f"the parameters of tool {tool.definition.name!r}: {error.message}"
        ) from error
    return made


def checked_arguments(tool: Tool, given: dict[str, Any] | str) -> dict[str, Any]:
    """Returns a call's arguments by name, as its schema and its signature have them; else ValueError."""
    if isinstance(given, str):
        schema = tool.definition.parameters
        single = schema.get("required") or list(schema.get("properties", {}))
        if len(single) > 1 or (given.strip() and not single):
            raise ValueError(f"give a JSON object with: {', '.join(single) or 'nothing in it'}")
        given = {single[0]: given} if single else {}
    try:
        error = next(validator_of(tool).iter_errors(given), None)
        if error is None:
            called = tool.action_text if isinstance(tool, EnvironmentStepTool) else tool.execute
            inspect.signature(called).bind(**given)
            return given
        place = ".".join(map(str, error.absolute_path))
        problem = (f"at {env.cut_middle(place, 100)!r}: " if place else "") + error.message
    # An unknown name, a reference that does not resolve, nesting too deep.
    except Exception as failure:
        problem = _message(failure)
    raise ValueError(env.cut_middle(problem, 300))


def guarded(
    function: Callable[[], Any], caught: type[BaseException] = Exception
) -> tuple[Any, ErrorKind]:
    """Returns the function's result, or its exception's text and kind; a tool's SystemExit ends nothing."""
    try:
        return function(), ""
    except ToolError as error:
        return _message(error), "exception"
    except TimeoutError as error:
        return _message(error) or "timed out", "timeout"
    except BaseException as error:
        if isinstance(error, env.Abandoned) or (
            isinstance(error, KeyboardInterrupt) and caught is Exception
        ):
            raise
        return f"{type(error).__name__}: {_message(error)}", "exception"


def _as_text(value: Any) -> str:
    """Returns text as it is, None as empty, anything else as JSON, else as str shows it."""
    if value is None or isinstance(value, str):
        return value or ""
    text, failed = guarded(lambda: json.dumps(value, ensure_ascii=False))
    return guarded(lambda: str(value))[0] if failed else text


def _message(error: BaseException) -> str:
    try:
        return str(error)
    # A tool's exceptions may do anything.
    except Exception:
        return "(no message)"


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
        return (
            self.calls[0]
            if self.calls
            else CallRecord(ToolCall(""), UNKNOWN, None, "no_call", NO_CALL, 0.0)
        )


class EpisodeSummary(list[str]):
    """Holds what came of an episode; it is the list of the model's responses.

    Attributes:
        turns: a ToolTurn each; of an episode in an environment what the rollout keeps of a turn.
        tool_statistics: per tool its `calls`, `failures` and `seconds` (in all).
        ending: how it ended, "done" where the environment or a tool said so; empty while it goes on.
    """

    def __init__(
        self,
        turns: Sequence[Any],
        calls: Iterable[Mapping[str, Any]],
        total_reward: float,
        ending: str,
    ) -> None:
        super().__init__(turn.text for turn in turns)
        self.turns, self.total_reward, self.ending = list(turns), total_reward, ending
        self.tool_statistics: dict[str, dict[str, float]] = {}
        for call in calls:
            of = self.tool_statistics.setdefault(
                call["name"], {"calls": 0, "failures": 0, "seconds": 0.0}
            )
            of["calls"] += 1
            of["failures"] += not call["ok"]
            of["seconds"] += call["seconds"]


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
        self.turns.append(replace(self._play(text), text=text))
        return self.turns[-1]

    def summary(self) -> EpisodeSummary:
        """Returns what came of the turns so far."""
        calls = [record.facts() for turn in self.turns for record in turn.calls]
        ending = "done" if self.turns and self.turns[-1].done else ""
        return EpisodeSummary(self.turns, calls, sum(turn.reward for turn in self.turns), ending)

    def _play(self, text: str) -> ToolTurn:
        calls = self.parser.parse(text)
        if calls:
            return self._execute(calls)
        if self.environment is None:
            return ToolTurn(NO_CALL, done=True)
        return ToolTurn(*env.step_environment(self.environment, text, self.max_observation_chars))

    def _execute(self, calls: list[ToolCall]) -> ToolTurn:
        records: list[CallRecord] = []
        info: dict[str, Any] = {}
        reward, done = 0.0, False
        for call in calls[:MAX_CALLS]:
            record = self.registry.execute(call, self.environment, self.max_observation_chars)
            records.append(record)
            if isinstance(record.value, StepResult):
                reward, done, info = (
                    reward + record.value.reward,
                    record.value.done,
                    info | record.value.info,
                )
            if done:
                break
        skipped = 0 if done else len(calls) - len(records)
        notes = (
            [f"{skipped} more calls were not executed: a turn may have {MAX_CALLS}."]
            if skipped
            else []
        )
        # Each under its call's number and name.
        results = [
            f"[{i}] {env.cut_middle(r.call.name, 100) or 'call'}: {r.result}"
            for i, r in enumerate(records, 1)
        ]
        told = (
            records[0].observation
            if len(records) == 1 and not notes
            else "\n".join(results + notes)
        )
        observation = env.check_observation(told, "the tools", self.max_observation_chars)
        return ToolTurn(observation, reward, done, info, tuple(records))


# --- From the names in `agent.tools` to a registry ---

BUILTIN_TOOLS = {
    "calculator": "custom.tools.builtin:CalculatorTool",
    "python": "custom.tools.builtin:PythonTool",
    "environment_step": "custom.tools:EnvironmentStepTool",
}


def load_tools(sources: Iterable[str | Tool]) -> ToolRegistry:
    """Makes a registry of new tools, one or several from each source; ValueError says what is no tool.

    Args:
        sources: "calculator", "python", "environment_step", "/path/file.py:name" or "module:name", whose object is a
            Tool class, a function that returns a Tool or several, or a Tool; or a .yaml of verl's form (above); or
            a Tool itself, of which the registry gets a copy.
    """
    registry = ToolRegistry()
    for source in sources:
        if isinstance(source, Tool):
            made: Any = copy.deepcopy(source)
        else:
            made = (
                read_tool_config(source) if source.endswith((".yaml", ".yml")) else _made_by(source)
            )
        for tool in made if isinstance(made, Iterable) else [made]:
            if not isinstance(tool, Tool):
                raise ValueError(say("no_tool", source=source, kind=type(tool).__name__))
            registry.register(tool)
    return registry


def _made_by(source: str) -> Any:
    """Returns what the name stands for, or what that makes when it is called."""
    place = BUILTIN_TOOLS.get(source, source)
    if not all(place.rpartition(":")):
        raise ValueError(say("unknown_tool", source=source, built_in=", ".join(BUILTIN_TOOLS)))
    found = load_object(place, "agent.tools:")
    return copy.deepcopy(found) if isinstance(found, Tool) or not callable(found) else found()


# --- Tools written for verl ---

# They have verl's base class, under its name. A file of `actor_rollout_ref.rollout.multi_turn.tool_config_path` is an
# entry of `agent.tools` like any other:
#
#     tools:
#       - class_name: package.module.Class      # or /path/to/file.py:Class
#         config: {}
#         tool_schema: {type: function, function: {name: search, description: …, parameters: {…}}}


@dataclass
class ToolResponse:
    """Holds what a tool of verl's answers; only text is shown to the model."""

    text: str | None = None
    image: Any = None
    video: Any = None


class BaseTool:
    """Is the base class of verl's tools: `execute` is a coroutine, between `create` and `release`."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config, self.tool_schema = config, tool_schema
        self.name = tool_schema["function"]["name"]

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Begins an instance."""
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[Any, float, dict]:
        """Answers a call: (response, reward, metrics), of which the response counts here."""
        raise NotImplementedError(f"{type(self).__name__}.execute")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Ends an instance."""


class VerlTool(Tool):
    """Answers calls by a tool of verl's, each in an instance of its own."""

    def __init__(self, tool: Any, schema: dict[str, Any]) -> None:
        self.tool, function = tool, schema["function"]
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        self.definition = ToolDefinition(
            function["name"], function.get("description") or "", parameters
        )

    def execute(self, **arguments: Any) -> Any:
        """Runs the call to its end."""
        return asyncio.run(self._call(arguments))

    async def _call(self, arguments: dict[str, Any]) -> Any:
        created = await self.tool.create(str(uuid.uuid4()))
        instance = created[0] if isinstance(created, tuple) else created
        try:
            answer = await self.tool.execute(instance, arguments)
        finally:
            await self.tool.release(instance)
        response = answer[0] if isinstance(answer, tuple) else answer
        return response if isinstance(response, str) else response.text


def read_tool_config(path: str) -> Iterator[Tool]:
    """Makes the tools that a file of verl's form describes."""
    for entry in OmegaConf.load(path).tools:
        module, _, name = entry.class_name.rpartition("." if ":" not in entry.class_name else ":")
        made = load_object(f"{module}:{name}", f"{path}:")
        config, schema = (
            OmegaConf.to_container(entry.get(k) or OmegaConf.create())
            for k in ("config", "tool_schema")
        )
        yield (
            made() if issubclass(made, Tool) else VerlTool(made(config, entry.tool_schema), schema)
        )
