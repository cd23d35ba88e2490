"""The tools that a model may call, by name, and the execution of single calls.

Invariant: no call raises, whatever the model wrote and whatever a tool did. A call that fails
becomes an observation that says why, under one of six kinds: unknown_tool, bad_json, cut,
bad_arguments, exception, timeout. Only the environment's own failures pass through, since they end
the episode.
"""

import inspect
import json
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any

from custom.asking import await_within, deeper, join_within
from custom.coroutines import finished
from custom.env import Observation, StepResult, Task
from custom.env_calls import (
    MAX_OBSERVATION_CHARS,
    call_method,
    check_observation,
    check_step,
    cut_middle,
    located,
    raised,
    step_environment,
)
from custom.tools.calls import UNKNOWN, CallRecord, Outcome, ToolCall
from custom.tools.definition import Tool, ToolDefinition
from custom.tools.environment_step import EnvironmentStepTool
from custom.tools.execution import (
    checked_arguments,
    guarded,
    make_validator,
    require_same_arguments,
)
from custom.tools.verl_tools import tools_kwargs_of
from data.process_globals import mend_process_globals
from data.warn_once import warn_once

# Calls of one tool that have run into its deadline and still run; while there are so many it is not
# called again.
MAX_HANGING = 4
# A model can write these signs in a call, and chat APIs take them, beside letters and digits.
TOOL_NAME = re.compile(r"[\w.:/-]+")
# Characters of an invented tool's name that the model is shown.
MAX_NAME_CHARS = 100


class ToolRegistry:
    """Keeps `tools` by name, and executes calls with their arguments checked."""

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self.tools: dict[str, Tool] = {}
        # By tool: threads of calls that were abandoned at their deadline.
        self._hanging: dict[str, list[Thread]] = {}
        for tool in tools:
            self.register(tool)

    def register(self, tool: Tool) -> None:
        """Adds a tool.

        Raises:
            ValueError: it has no valid definition, its code takes other arguments than its schema
                has, or its name is taken, or none that a call can have.
        """
        definition = getattr(tool, "definition", None)
        if (
            isinstance(tool, type)
            or not isinstance(definition, ToolDefinition)
            or not callable(tool.execute)
        ):
            where = located(getattr(tool, "execute", None), repr(tool))
            raise ValueError(
                f"{where} is no tool; give an instance of a Tool that has a definition"
            )
        if not TOOL_NAME.fullmatch(definition.name):
            possible = re.sub(r"[^\w.:/-]+", "_", definition.name.strip()) or "my_tool"
            where = located(tool.execute, type(tool).__name__)
            raise ValueError(
                f"{where}: a tool cannot be named {definition.name!r}: a name has letters, digits "
                f"and _ - . : / alone, as models and chat APIs write it; {possible!r} can be"
            )
        if definition.name == "unknown":
            where = located(tool.execute, type(tool).__name__)
            raise ValueError(
                f"{where}: a tool cannot be named 'unknown', as metrics count calls of tools that "
                "there are not under that name; give it another"
            )
        if self.tools.get(definition.name, tool) is not tool:
            raise ValueError(
                f"there is already a tool named {definition.name!r}; names must differ"
            )
        # Raises where the parameters are no schema.
        make_validator(tool)
        require_same_arguments(tool)
        self.tools[definition.name] = tool

    def bind(self, environment: Any) -> None:
        """Gives each tool the environment that its calls are about; None changes nothing.

        One that steps an environment keeps what it was made with: its calls step the turn's.
        """
        if environment is None:
            return
        for tool in self.tools.values():
            # A tool may have a property of that name.
            if not isinstance(tool, EnvironmentStepTool):
                with suppress(AttributeError):
                    tool.environment = environment

    def begin_episode(self, task: Task, environment: Any = None) -> None:
        """Tells the tools that an episode of this task begins, in this environment.

        Warns once of a row that has arguments for a tool that there is not.
        """
        self.bind(environment)
        unknown = sorted(tools_kwargs_of(task).keys() - self.tools.keys())
        if unknown:
            warn_once(
                __name__,
                f"tools_kwargs of the rows are for {', '.join(unknown)}, and no tool is called so; "
                f"the tools are: {', '.join(self.tools) or 'none'}",
            )
        for tool in self.tools.values():
            call_method(tool, "begin_episode", task)

    def close(self) -> None:
        """Closes the tools."""
        for tool in self.tools.values():
            call_method(tool, "close")

    def schemas(self) -> list[dict[str, Any]]:
        """Returns all tools as function schemas."""
        return [tool.definition.schema() for tool in self.tools.values()]

    def execute_tool(self, tool_name: str, /, **arguments: Any) -> tuple[bool, str]:
        """Executes a tool by hand; returns whether it succeeded, and what the model would see."""
        record = self.execute(ToolCall(tool_name, arguments))
        return record.ok, record.result

    def execute(
        self, call: ToolCall, environment: Any = None, max_chars: int = MAX_OBSERVATION_CHARS
    ) -> CallRecord:
        """Executes a call.

        Args:
            call: the call as the model wrote it.
            environment: where given, an EnvironmentStepTool steps it and lets its errors pass, and
                all other tools find it in `self.environment`.
            max_chars: the observation is cut to so many characters.
        """
        started = time.perf_counter()
        outcome = self._attempt(call, environment, max_chars)
        whole = _observation_of(outcome)
        observation = check_observation(whole, f"tool {call.name}", max_chars)
        name = UNKNOWN
        if call.name in self.tools:
            name = call.name
        return CallRecord(
            call=call,
            name=name,
            value=outcome.value,
            error_kind=outcome.error_kind,
            raised=outcome.where,
            observation=observation,
            seconds=time.perf_counter() - started,
            chars_left_out=_length(whole) - _length(observation),
        )

    def _attempt(self, call: ToolCall, environment: Any, max_chars: int) -> Outcome:
        if call.error_kind:
            return Outcome(call.error, call.error_kind)
        tool = self.tools.get(call.name)
        if tool is None:
            shown_name = cut_middle(call.name, MAX_NAME_CHARS)
            known = ", ".join(self.tools) or "none"
            text = f"there is no tool {shown_name!r}; the tools are: {known}"
            return Outcome(text, "unknown_tool")
        try:
            arguments = checked_arguments(tool, call.arguments)
        except ValueError as error:
            text = f"wrong arguments for tool {call.name!r}: {error}"
            return Outcome(text, "bad_arguments")
        if environment is not None and isinstance(tool, EnvironmentStepTool):
            return _step(tool, arguments, environment, max_chars)
        self.bind(environment)
        return self._run(tool, arguments)

    def _run(self, tool: Tool, arguments: dict[str, Any]) -> Outcome:
        """Runs the tool, within its deadline where it has one."""
        name = tool.definition.name
        timeout_s = tool.definition.timeout_s
        # A coroutine stays in the event loop of its episode, and is cancelled at its deadline.
        is_async = inspect.iscoroutinefunction(tool.execute)

        def call() -> Any:
            if is_async and timeout_s is not None:
                return await_within(tool.execute(**arguments), timeout_s, _overdue(name, timeout_s))
            return tool.execute(**arguments)

        def run() -> Any:
            with deeper():
                value = finished(call())
            if isinstance(value, StepResult):
                # Checked as an environment's would be.
                return check_step(value, "the tool")
            return value

        if timeout_s is None or is_async:
            outcome = guarded(run)
        else:
            outcome = self._run_in_thread(name, run, timeout_s)
        if outcome.raised is None:
            return outcome
        return replace(outcome, where=raised(outcome.raised, tool.execute))

    def _run_in_thread(self, name: str, run: Callable[[], Any], timeout_s: float) -> Outcome:
        """Runs a call in a thread of its own, which is left to itself after `timeout_s` seconds."""
        hanging = [thread for thread in self._hanging.get(name, []) if thread.is_alive()]
        self._hanging[name] = hanging
        if len(hanging) >= MAX_HANGING:
            text = f"tool {name!r} is still busy with {len(hanging)} earlier calls"
            return Outcome(text, "timeout")
        outcomes: list[Outcome] = []

        def run_guarded() -> None:
            outcome = guarded(run, in_thread=True)
            mend_process_globals()
            outcomes.append(outcome)

        # The tool may ask the policy, as its episode's.
        run_here = partial(copy_context().run, run_guarded)
        thread = Thread(target=run_here, name=f"tool-{name}", daemon=True)
        thread.start()
        join_within(thread, timeout_s)
        if outcomes:
            return outcomes[0]
        hanging.append(thread)
        return Outcome(_overdue(name, timeout_s), "timeout")


def _overdue(name: str, timeout_s: float) -> str:
    """Says that a call was given up at its deadline."""
    return f"tool {name!r} did not answer within {timeout_s:g} s"


def _step(
    tool: EnvironmentStepTool, arguments: dict[str, Any], environment: Any, max_chars: int
) -> Outcome:
    """Steps the environment with the action that the arguments stand for; its errors pass."""
    action = guarded(lambda: finished(tool.action_text(**arguments)))
    if action.error_kind:
        return action
    return Outcome(step_environment(environment, action.value, max_chars))


def _observation_of(outcome: Outcome) -> Observation:
    """Returns what the model is shown: a step's observation, an error's text, or a value's."""
    if isinstance(outcome.value, StepResult):
        return outcome.value.observation
    text = _as_text(outcome.value)
    if outcome.error_kind:
        return f"Error ({outcome.error_kind}): {text}"
    return text


def _length(observation: Observation) -> int:
    """Counts the characters of an observation, or of all its messages."""
    if isinstance(observation, str):
        return len(observation)
    return sum(len(message["content"]) for message in observation)


def _as_text(value: Any) -> str:
    """Returns text as it is, None as empty, anything else as JSON, else as str shows it."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    as_json = guarded(lambda: json.dumps(value, ensure_ascii=False))
    if not as_json.error_kind:
        return as_json.value
    return guarded(lambda: str(value)).value
