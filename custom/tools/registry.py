"""Tools: what a model may call, and the manager that executes its calls turn by turn.

Invariant: no call raises, whatever the model wrote and whatever a tool did. A call that fails becomes an observation that
says why, and is counted under one of five kinds: unknown_tool, bad_json, bad_arguments, exception, timeout. Only the
environment's own failures pass through, since they end the episode.
"""

import copy
import importlib
import inspect
import queue
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from custom.env import (
    MAX_OBSERVATION_CHARS,
    Abandoned,
    StepResult,
    check_done,
    check_observation,
    check_reward,
    cut_middle,
    step_environment,
)
from custom.tools.parsers import ErrorKind, ToolCall
from custom.tools.tool import EnvironmentStepTool, Tool, ToolDefinition, ToolError
from data.loading import load_extern_object

BUILTIN_TOOLS = {
    "calculator": "custom.tools.builtin:CalculatorTool",
    "python": "custom.tools.builtin:PythonTool",
    "environment_step": "custom.tools:EnvironmentStepTool",
}


MAX_HANGING = 4  # calls of one tool that ran into its deadline and still run; as long as they do it is not called again


_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


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
        action = guarded(lambda: tool.action_text(**arguments))
        return Outcome(step_environment(environment, action.value, max_chars)) if action.ok else action

    def _run(self, tool: Tool, arguments: dict[str, Any]) -> Outcome:
        timeout, name = tool.definition.timeout_s, tool.definition.name
        if timeout is None:
            return guarded(lambda: _checked(tool.execute(**arguments)))
        hanging = [thread for thread in self._hanging.get(name, []) if thread.is_alive()]
        self._hanging[name] = hanging
        if len(hanging) >= MAX_HANGING:
            return Outcome(f"tool {name!r} is still busy with {len(hanging)} earlier calls", "timeout")
        answers: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        thread = threading.Thread(
            target=lambda: answers.put(guarded(lambda: _checked(tool.execute(**arguments)), BaseException)),
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


def guarded(function: Callable[[], Any], caught: type[BaseException] = Exception) -> Outcome:
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
