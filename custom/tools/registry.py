"""The tools that a model may call, by name, and the record of what came of each call.

Invariant: no call raises, whatever the model wrote and whatever a tool did. A call that fails becomes an observation
that says why, under one of five kinds: unknown_tool, bad_json, bad_arguments, exception, timeout. Only the
environment's own failures pass through, since they end the episode.
"""

import inspect
import json
import re
import time
from collections.abc import Callable, Iterable
from threading import Thread
from typing import Any, NamedTuple

from custom import env
from custom.env import MAX_OBSERVATION_CHARS, Abandoned, Observation, StepResult
from custom.tools.parsers import ErrorKind, ToolCall
from custom.tools.tool import EnvironmentStepTool, Tool, ToolDefinition, ToolError

# So many calls of one tool may have run into its deadline and still run; while they do it is not called again.
MAX_HANGING = 4
# What calls of no registered tool are counted under: a model's inventions are no metric's names.
UNKNOWN = "(unknown)"
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


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
        return {"name": self.name, "ok": self.ok, "error_kind": self.error_kind, "seconds": self.seconds}


class ToolRegistry:
    """Keeps `tools` by name, and executes calls with their arguments checked."""

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self.tools: dict[str, Tool] = {}
        self._checks: dict[str, _ArgumentCheck] = {}
        self._hanging: dict[str, list[Thread]] = {}
        for tool in tools:
            self.register(tool)

    def register(self, tool: Tool) -> None:
        """Adds a tool; ValueError where it has no valid definition, or its name is taken."""
        definition = getattr(tool, "definition", None)
        if isinstance(tool, type) or not isinstance(definition, ToolDefinition) or not callable(tool.execute):
            raise ValueError(f"{tool!r} is no tool; give an instance of a Tool that has a definition")
        if not TOOL_NAME.fullmatch(definition.name):
            raise ValueError(f"the tool name {definition.name!r} is not allowed; use at most 64 of A-Z a-z 0-9 _ - .")
        if definition.timeout_s is not None and not definition.timeout_s > 0:
            raise ValueError(f"timeout_s={definition.timeout_s} of tool {definition.name!r} must be above 0, or None")
        if self.tools.get(definition.name, tool) is not tool:
            raise ValueError(f"there is already a tool named {definition.name!r}; names must differ")
        self._checks[definition.name] = _ArgumentCheck(tool)
        self.tools[definition.name] = tool

    def schemas(self) -> list[dict[str, Any]]:
        """Returns all tools as function schemas."""
        return [tool.definition.schema() for tool in self.tools.values()]

    def execute_tool(self, tool_name: str, /, **arguments: Any) -> tuple[bool, str]:
        """Executes a tool by hand; returns whether it succeeded, and what the model would be told."""
        record = self.execute(ToolCall(tool_name, arguments))
        return record.ok, record.result

    def execute(self, call: ToolCall, environment: Any = None, max_chars: int = MAX_OBSERVATION_CHARS) -> CallRecord:
        """Executes a call; an EnvironmentStepTool steps `environment`, where one is given, and lets its errors pass.

        The observation is cut to `max_chars`.
        """
        started = time.perf_counter()
        value, error_kind = self._attempt(call, environment, max_chars)
        told = value.observation if isinstance(value, StepResult) else _as_text(value)
        told = f"Error ({error_kind}): {told}" if error_kind else told
        told = env.check_observation(told, f"tool {call.name}", max_chars)
        name, seconds = call.name if call.name in self.tools else UNKNOWN, time.perf_counter() - started
        return CallRecord(call=call, name=name, value=value, error_kind=error_kind, observation=told, seconds=seconds)

    def _attempt(self, call: ToolCall, environment: Any, max_chars: int) -> tuple[Any, ErrorKind]:
        if call.error_kind:
            return call.error, call.error_kind
        tool = self.tools.get(call.name)
        if tool is None:
            known = ", ".join(self.tools) or "none"
            return f"there is no tool {env.cut_middle(call.name, 100)!r}; the tools are: {known}", "unknown_tool"
        try:
            arguments = self._checks[call.name].by_name(call.arguments)
        except ValueError as error:
            return f"wrong arguments for tool {call.name!r}: {error}", "bad_arguments"
        if environment is None or not isinstance(tool, EnvironmentStepTool):
            return self._run(tool, arguments)
        action, error_kind = guarded(lambda: tool.action_text(**arguments))
        return (action, error_kind) if error_kind else (env.step_environment(environment, action, max_chars), "")

    def _run(self, tool: Tool, arguments: dict[str, Any]) -> tuple[Any, ErrorKind]:
        def run() -> Any:
            value = tool.execute(**arguments)
            # Checked as an environment's would be.
            return env.check_step(value, "the tool") if isinstance(value, StepResult) else value

        timeout, name = tool.definition.timeout_s, tool.definition.name
        if timeout is None:
            return guarded(run)
        hanging = self._hanging[name] = [thread for thread in self._hanging.get(name, []) if thread.is_alive()]
        if len(hanging) >= MAX_HANGING:
            return f"tool {name!r} is still busy with {len(hanging)} earlier calls", "timeout"
        answers: list[tuple[Any, ErrorKind]] = []
        thread = Thread(target=lambda: answers.append(guarded(run, BaseException)), name=f"tool-{name}", daemon=True)
        thread.start()
        thread.join(timeout)
        if answers:
            return answers[0]
        hanging.append(thread)
        return f"tool {name!r} did not answer within {timeout:g} s", "timeout"


class _ArgumentCheck:
    """Checks the arguments of a tool's calls against its schema and its signature."""

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
        """Returns the arguments as `execute` takes them; ValueError says what is wrong with them."""
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
            problem = (f"at {env.cut_middle(place, 100)!r}: " if place else "") + error.message
        # An unknown name, a reference that does not resolve, nesting too deep.
        except Exception as failure:
            problem = _message(failure)
        raise ValueError(env.cut_middle(problem, 300))


def guarded(function: Callable[[], Any], caught: type[BaseException] = Exception) -> tuple[Any, ErrorKind]:
    """Returns the function's result, or its exception's text and kind; a tool's SystemExit ends nothing."""
    try:
        return function(), ""
    except ToolError as error:
        return _message(error), "exception"
    except TimeoutError as error:
        return _message(error) or "timed out", "timeout"
    except BaseException as error:
        if isinstance(error, Abandoned) or (isinstance(error, KeyboardInterrupt) and caught is Exception):
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
