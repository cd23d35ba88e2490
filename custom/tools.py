"""Tools: what a model may call, and the manager that executes its calls turn by turn.

Invariant: no call raises, whatever the model wrote and whatever a tool did. A call that fails becomes an observation that
says why, and is counted under one of five kinds: unknown_tool, bad_json, bad_arguments, exception, timeout. Only the
environment's own failures pass through, since they end the episode.
"""

import copy
import importlib
import inspect
import json
import queue
import re
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from custom.env import (
    MAX_OBSERVATION_CHARS,
    Observation,
    StepResult,
    check_done,
    check_observation,
    check_reward,
    cut_middle,
    step_environment,
)
from custom.env_homes import Abandoned
from custom.tool_parsers import ActionParser, ErrorKind, ToolCall
from data.loading import load_extern_object

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
BUILTIN_TOOLS = {
    "calculator": "custom.builtin_tools:CalculatorTool",
    "python": "custom.builtin_tools:PythonTool",
    "environment_step": "custom.tools:EnvironmentStepTool",
}
UNKNOWN = "(unknown)"  # what calls of no registered tool are counted under: a model's inventions are no metric's names
MAX_CALLS = 32  # per turn
MAX_HANGING = 4  # calls of one tool that ran into its deadline and still run; as long as they do it is not called again
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ToolError(Exception):
    """Raised by a tool to fail with exactly this text."""


@dataclass(frozen=True)
class ToolDefinition:
    """What the model is told of a tool.

    Args:
        name: letters, digits, `_`, `-` and `.`, at most 64.
        description: for the model.
        parameters: a JSON schema of an object; arguments are checked against it before the tool sees them.
        timeout_s: seconds after which a call counts as failed; None: the tool sees to it itself.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: dict(NO_PARAMETERS))
    timeout_s: float | None = None

    def schema(self) -> dict[str, Any]:
        """The function schema as OpenAI writes it, which chat templates take as `tools=`."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class Tool(ABC):
    """A tool: a `definition`, and `execute`, which gets the arguments by name.

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
    another episode's game; `environment` serves calls outside of it. It has no deadline of its own: the episode's count.
    A subclass with a definition of its own says in `action_text` which action its arguments stand for.
    """

    def __init__(
        self,
        environment: Any = None,
        name: str = "environment_step",
        description: str = "Takes an action in the environment and returns what is then observed.",
    ) -> None:
        self.environment = environment
        action = {"type": "string", "description": "The action to take."}
        parameters = {"type": "object", "properties": {"action": action}, "required": ["action"]}
        self.definition = ToolDefinition(name, description, parameters)

    def execute(self, **arguments: Any) -> StepResult:
        """One step of its own environment."""
        if self.environment is None:
            raise ToolError("there is no environment to act in")
        return step_environment(self.environment, self.action_text(**arguments))

    def action_text(self, action: str) -> str:
        """The environment's action for the model's arguments."""
        return action


@dataclass(frozen=True)
class Outcome:
    """What came of a call: `value` is the tool's result, or the error's text."""

    value: Any
    error_kind: ErrorKind = ""

    @property
    def ok(self) -> bool:
        return not self.error_kind


class ToolRegistry:
    """Tools by name; executes calls with their arguments checked, and turns every failure into an Outcome."""

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        self._checks: dict[str, _ArgumentCheck] = {}
        self._hanging: dict[str, list[threading.Thread]] = {}
        for tool in tools:
            self.register(tool)

    def __getstate__(self) -> dict[str, Any]:
        """The tools alone: a copy waits for nobody's threads."""
        return {"tools": list(self._tools.values())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Registers the tools anew."""
        ToolRegistry.__init__(self, state["tools"])

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def __getitem__(self, name: str) -> Tool:
        return self._tools[name]

    def __len__(self) -> int:
        return len(self._tools)

    @property
    def names(self) -> list[str]:
        """The registered names, in order."""
        return list(self._tools)

    def register(self, tool: Tool) -> None:
        """Adds a tool; ValueError where it has no valid definition, or its name is taken."""
        definition = getattr(tool, "definition", None)
        if isinstance(tool, type) or not isinstance(definition, ToolDefinition) or not callable(tool.execute):
            raise ValueError(
                f"{tool!r} is no tool; give an instance of a Tool that has a definition = ToolDefinition(…)"
            )
        if not _NAME.fullmatch(definition.name):
            raise ValueError(f"the tool name {definition.name!r} is not allowed; use at most 64 of A-Z a-z 0-9 _ - .")
        if definition.timeout_s is not None and not definition.timeout_s > 0:
            raise ValueError(f"timeout_s={definition.timeout_s} of tool {definition.name!r} must be above 0, or None")
        if definition.parameters.get("type") != "object":
            raise ValueError(f"the parameters of tool {definition.name!r} must be a JSON schema with 'type': 'object'")
        if self._tools.get(definition.name, tool) is not tool:
            raise ValueError(f"there is already a tool named {definition.name!r}; names must differ")
        self._checks[definition.name] = _ArgumentCheck(tool)
        self._tools[definition.name] = tool

    def schemas(self) -> list[dict[str, Any]]:
        """All tools as function schemas."""
        return [tool.definition.schema() for tool in self._tools.values()]

    def execute_tool(self, name: str, /, **arguments: Any) -> tuple[bool, Any]:
        """(True, the tool's result) or (False, the error's text)."""
        outcome = self.execute(ToolCall(name, arguments))
        return outcome.ok, outcome.value

    def execute(self, call: ToolCall, environment: Any = None, max_chars: int = MAX_OBSERVATION_CHARS) -> Outcome:
        """Executes a call; an EnvironmentStepTool steps `environment`, where one is given, and lets its errors pass."""
        if call.error_kind:
            return Outcome(call.error, call.error_kind)
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return Outcome(f"there is no tool {cut_middle(call.name, 100)!r}; the tools are: {known}", "unknown_tool")
        try:
            arguments = self._checks[call.name].by_name(call.arguments)
        except ValueError as error:
            return Outcome(f"wrong arguments for tool {call.name!r}: {error}", "bad_arguments")
        if environment is None or not isinstance(tool, EnvironmentStepTool):
            return self._run(tool, arguments)
        action = _guarded(lambda: tool.action_text(**arguments))
        return Outcome(step_environment(environment, action.value, max_chars)) if action.ok else action

    def _run(self, tool: Tool, arguments: dict[str, Any]) -> Outcome:
        timeout, name = tool.definition.timeout_s, tool.definition.name
        if timeout is None:
            return _guarded(lambda: _checked(tool.execute(**arguments)))
        hanging = [thread for thread in self._hanging.get(name, []) if thread.is_alive()]
        self._hanging[name] = hanging
        if len(hanging) >= MAX_HANGING:
            return Outcome(f"tool {name!r} is still busy with {len(hanging)} earlier calls", "timeout")
        answers: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        thread = threading.Thread(
            target=lambda: answers.put(_guarded(lambda: _checked(tool.execute(**arguments)), BaseException)),
            name=f"tool-{name}",
            daemon=True,
        )
        thread.start()
        try:
            return answers.get(timeout=timeout)
        except queue.Empty:
            hanging.append(thread)
            return Outcome(f"tool {name!r} did not answer within {timeout:g} s", "timeout")


def load_tools(sources: Iterable[str]) -> ToolRegistry:
    """A registry of new tools, each from "calculator", "python", "environment_step", "/path/file.py:name" or "module:name".

    The name's object is a Tool class, a function that returns a Tool or several, or a Tool.
    """
    registry = ToolRegistry()
    for source in sources:
        found = _load(source)
        made = copy.deepcopy(found) if isinstance(found, Tool) or not callable(found) else found()
        for tool in [made] if isinstance(made, Tool) or not isinstance(made, Iterable) else made:
            if not isinstance(tool, Tool):
                raise ValueError(
                    f"agent.tools: {source!r} is a {type(tool).__name__}; allowed: a Tool, or what makes one"
                )
            registry.register(tool)
    return registry


def _load(source: str) -> Any:
    place, _, name = BUILTIN_TOOLS.get(source, source).rpartition(":")
    if not place or not name:
        raise ValueError(
            f"agent.tools: {source!r} is unknown; allowed: {', '.join(BUILTIN_TOOLS)}, /path/to/file.py:name, module:name"
        )
    if place.endswith(".py"):
        return load_extern_object(place, name)
    try:
        return getattr(importlib.import_module(place), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"agent.tools: {source!r} cannot be loaded: {error}") from error


class _ArgumentCheck:
    """A tool's schema and signature, against which the arguments of its calls are checked."""

    def __init__(self, tool: Tool) -> None:
        import jsonschema

        schema = tool.definition.parameters
        cls = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            cls.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ValueError(f"the parameters of tool {tool.definition.name!r}: {error.message}") from error
        self.validator = cls(schema)
        self.signature = inspect.signature(tool.action_text if isinstance(tool, EnvironmentStepTool) else tool.execute)
        self.single = schema.get("required") or list(schema.get("properties", {}))

    def by_name(self, arguments: dict[str, Any] | str) -> dict[str, Any]:
        """The arguments as `execute` takes them; ValueError says what is wrong with them."""
        if isinstance(arguments, str):
            if len(self.single) != 1:
                raise ValueError(f"give a JSON object with: {', '.join(self.single) or 'nothing in it'}")
            arguments = {self.single[0]: arguments}
        try:
            error = next(self.validator.iter_errors(arguments), None)
            if error is None:
                self.signature.bind(**arguments)
                return arguments
            place = ".".join(map(str, error.absolute_path))
            problem = (f"at {cut_middle(place, 100)!r}: " if place else "") + error.message
        except Exception as failure:  # an unknown name, a reference that does not resolve, nesting too deep
            problem = _message(failure)
        raise ValueError(cut_middle(problem, 300))


def _checked(value: Any) -> Any:
    """A tool's own StepResult as an environment's would be checked; anything else as it is."""
    if not isinstance(value, StepResult):
        return value
    observation, where = check_observation(value.observation, "the tool"), "the tool"
    return StepResult(observation, check_reward(value.reward, where), check_done(value.done, where), dict(value.info))


def _guarded(function: Callable[[], Any], caught: type[BaseException] = Exception) -> Outcome:
    """The function's result, or its exception as an Outcome; a tool's SystemExit ends nothing."""
    try:
        return Outcome(function())
    except ToolError as error:
        return Outcome(_message(error), "exception")
    except TimeoutError as error:
        return Outcome(_message(error) or "timed out", "timeout")
    except BaseException as error:
        if isinstance(error, Abandoned) or (isinstance(error, KeyboardInterrupt) and caught is Exception):
            raise
        return Outcome(f"{type(error).__name__}: {_message(error)}", "exception")


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a tool's exceptions may do anything
        return "(no message)"


# --- Turns ---


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
    as_json = _guarded(lambda: json.dumps(value, ensure_ascii=False))
    return as_json.value if as_json.ok else _guarded(lambda: str(value)).value


def _as_text(observation: Observation) -> str:
    return observation if isinstance(observation, str) else "\n".join(message["content"] for message in observation)


def _numbered(records: list[CallRecord], observations: list[Observation]) -> str:
    """Several results as one text, each under its call's number and name."""
    titles = [f"[{i}] {record.requested or 'call'}: " for i, record in enumerate(records, 1)]
    titles += [""] * (len(observations) - len(titles))
    return "\n".join(title + _as_text(shown) for title, shown in zip(titles, observations, strict=True))
