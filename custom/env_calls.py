"""Calls of environments, and the checks of what they return.

Users write environments (custom/env.py); everybody else calls them through `reset_environment` and
`step_environment`, whose methods may be `async def`. Invariant: what these return is well formed,
that is text that can be encoded, of bounded length, with a reward that float32 holds. Anything else
raises `BadEnvironment`, which says what came, from which file and line, and what is allowed.
"""

import inspect
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import CodeType
from typing import Any

import numpy as np

from custom.coroutines import finished
from custom.env import (
    ROLES,
    BadEnvironment,
    Message,
    NewHistory,
    Observation,
    StepReply,
    StepResult,
    Task,
)
from custom.own_generators import OwnGenerators
from data.loading import is_users_file
from data.texts import printable

# Stands where the middle of a text was left out.
LEFT_OUT = " characters or more left out …]"
# Longer observations are cut in the middle, longer errors at their end.
MAX_OBSERVATION_CHARS = 20_000
MAX_ERROR_CHARS = 2_000
# A traceback is cut to these.
MAX_FRAMES = 4
# Limits of one observation, and of a message's role, name or tool_call_id.
MAX_MESSAGES = 1_000
MAX_NAME_CHARS = 200
# So much of a value is shown in an error message.
MAX_SHOWN_CHARS = 100
# So much of a text that a user's function raised is shown.
MAX_RAISED_CHARS = 300
LARGEST_REWARD = float(np.finfo(np.float32).max)
# The keys of a message that chat templates read.
MESSAGE_KEYS = ("role", "content", "name", "tool_call_id")


class Abandoned(BaseException):
    """Ends a call from inside its thread when it has overrun its deadline.

    It is a BaseException, so that `except Exception` does not stop it.
    """

    def __str__(self) -> str:
        return "still running after its deadline"


# --- Calls ---


def reset_environment(
    env: Any, seed: int | None, max_chars: int = MAX_OBSERVATION_CHARS, task: Task | None = None
) -> Observation:
    """Starts an episode and returns its first observation; see `begin_environment`."""
    return begin_environment(env, seed, max_chars, task)[0]


def begin_environment(
    env: Any, seed: int | None, max_chars: int = MAX_OBSERVATION_CHARS, task: Task | None = None
) -> tuple[Observation, Mapping[str, Any]]:
    """Starts an episode; returns its first observation, cut to `max_chars`, and its info.

    The seed goes to `reset(seed=…)` where its signature takes one. Else Python's and numpy's global
    generators are seeded for this call and put back after it: all threads share those, so that
    steps that draw from them, and other threads that do, are not reproducible. `reset` is given
    those columns of a task that its signature takes.

    Raises:
        BadEnvironment: it takes no column of the task, or returns no observation.
    """
    where = f"{type(env).__name__}.reset"
    arguments = _reset_arguments(env, where, seed, task or {})
    # An object that is no BaseEnvironment may take no attributes.
    with suppress(AttributeError):
        env._done = False
    if seed is None or "seed" in arguments:
        answer = finished(env.reset(**arguments))
    else:
        with OwnGenerators(seed).installed():
            answer = finished(env.reset(**arguments))
    answer, info = split_info(answer)
    if isinstance(answer, list) and not answer:
        raise BadEnvironment(f"{where} returned no message; allowed: a string, or messages")
    return check_observation(answer, located(env.reset, where), max_chars), info


def _reset_arguments(env: Any, where: str, seed: int | None, task: Task) -> dict[str, Any]:
    """Returns what `reset` takes of the seed and the task's columns."""
    offered: dict[str, Any] = {}
    if seed is not None:
        offered["seed"] = seed
    offered.update(task)
    arguments = {name: value for name, value in offered.items() if takes_keyword(env.reset, name)}
    if task and arguments.keys().isdisjoint(task):
        raise BadEnvironment(
            f"{where} takes none of {', '.join(task)}, which the dataset's rows have"
        )
    return arguments


def split_info(answer: Any) -> tuple[Any, Mapping[str, Any]]:
    """Splits what a `reset` returned into observation and info, where it is gymnasium's pair."""
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping):
        return answer
    return answer, {}


def step_environment(env: Any, action: str, max_chars: int = MAX_OBSERVATION_CHARS) -> StepResult:
    """Plays one step and checks what it returns, four values or gymnasium's five.

    Raises:
        BadEnvironment: it returns anything else.
    """
    where = located(env.step, f"{type(env).__name__}.step")
    return check_step(finished(env.step(action)), where, max_chars)


def call_method(thing: Any, method: str, *arguments: Any) -> Any:
    """Calls a method that users may leave out; None where there is no such method."""
    function = getattr(thing, method, None)
    if not callable(function):
        return None
    return finished(function(*arguments))


def takes_keyword(function: Callable[..., Any], name: str) -> bool:
    """Checks whether the function can be called with `name=`."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return True
        if parameter.name == name and parameter.kind in by_name:
            return True
    return False


# --- Checks ---
# Each returns the checked value or raises BadEnvironment, with a message that begins with `where`.


def check_step(answer: Any, where: str, max_chars: int = MAX_OBSERVATION_CHARS) -> StepResult:
    """Checks what a step returned: four values, or gymnasium's five, of which two end the game.

    A StepReply stands for four values.
    """
    if isinstance(answer, StepReply):
        answer = answer.as_values()
    if not isinstance(answer, tuple | list) or len(answer) not in (4, 5):
        raise BadEnvironment(
            f"{where} returned {shown(answer)}; allowed: (observation, reward, done, info) or "
            "(observation, reward, terminated, truncated, info), or a StepReply"
        )
    observation, reward, *dones, info = answer
    if info is not None and not isinstance(info, Mapping):
        raise BadEnvironment(f"{where} returned the info {shown(info)}; allowed: a dict")
    checked_dones = [check_done(done, where) for done in dones]
    return StepResult(
        observation=check_observation(observation, where, max_chars),
        reward=check_reward(reward, where),
        done=any(checked_dones),
        info={} if info is None else dict(info),
    )


def check_observation(
    observation: Any, where: str, max_chars: int = MAX_OBSERVATION_CHARS
) -> Observation:
    """Checks text, or chat messages, and makes it what a tokenizer can encode.

    Messages share `max_chars` equally, and keep the keys that chat templates read. In a new history
    each message may have `max_chars`, as each was an observation.
    """
    if isinstance(observation, str):
        return cut_middle(printable(observation), max_chars)
    if not isinstance(observation, list) or not all(map(_is_message, observation)):
        raise BadEnvironment(
            f"{where} returned the observation {shown(observation)}; allowed: a string, or a list "
            f"of messages {{'role': one of {', '.join(ROLES)}, 'content': string}}; "
            f"{_fix_of_observation(observation)}"
        )
    if len(observation) > MAX_MESSAGES:
        raise BadEnvironment(
            f"{where} returned {len(observation)} messages; allowed: {MAX_MESSAGES}"
        )
    if isinstance(observation, NewHistory):
        if not observation:
            raise BadEnvironment(f"{where} returned StepReply(messages=[]); allowed: one or more")
        return NewHistory(_check_message(message, max_chars) for message in observation)
    return [_check_message(message, max_chars // len(observation)) for message in observation]


def _fix_of_observation(observation: Any) -> str:
    """Says what to return in place of an observation that is no text."""
    if observation is None:
        return "'' says nothing"
    if _is_message(observation):
        return "put the message into a list"
    if isinstance(observation, bool | float):
        return "a step returns observation, reward, done, info in this order"
    return "write it out as the model is to read it"


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in ROLES
        and isinstance(message.get("content"), str)
    )


def _check_message(message: dict[str, Any], max_chars: int) -> Message:
    checked: Message = {}
    for key in MESSAGE_KEYS:
        text = message.get(key)
        if key == "content":
            checked[key] = cut_middle(printable(message[key]), max_chars)
        elif isinstance(text, str):
            checked[key] = printable(text[:MAX_NAME_CHARS])
    return checked


def check_reward(reward: Any, where: str) -> float:
    """Checks that a reward is a number that float32 holds.

    numpy's numbers and tensors of one element are numbers, too; texts are not.
    """
    value = float("nan")
    if not isinstance(reward, str | bytes | bytearray):
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            value = float(reward)
    # Not `>`: NaN compares as False and is to be refused, too.
    if not abs(value) <= LARGEST_REWARD:
        raise BadEnvironment(
            f"{where} returned the reward {shown(reward)}; allowed: a finite number"
        )
    return value


def check_done(done: Any, where: str) -> bool:
    """Checks that a value is True or False, which may also be numpy's, or 1 or 0."""
    is_zero_or_one = isinstance(done, int | np.integer) and done in (0, 1)
    if isinstance(done, bool | np.bool_) or is_zero_or_one:
        return bool(done)
    raise BadEnvironment(
        f"{where} returned done={shown(done)}; allowed: True or False; a step returns observation, "
        "reward, done, info in this order"
    )


def cut_middle(text: str, max_chars: int) -> str:
    """Returns at most `max_chars` characters: a longer text's beginning and end around a mark."""
    if len(text) <= max_chars:
        return text
    mark = f"\n[… {len(text) - max_chars:,}{LEFT_OUT}\n"
    num_kept = max(max_chars - len(mark), 0)
    beginning = text[: (num_kept + 1) // 2]
    end = text[len(text) - num_kept // 2 :]
    return (beginning + mark + end)[:max_chars]


# --- What error messages show ---


def shown(value: Any) -> str:
    """Returns any value, shortened, with its type, for an error message; never raises."""
    try:
        text = repr(value)
    # A user's __repr__ may do anything, and Python writes no int of more than 4,300 digits.
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"
    if len(text) > MAX_SHOWN_CHARS:
        text = f"{text[:MAX_SHOWN_CHARS]}…"
    return f"{text} ({type(value).__name__})"


def describe(error: BaseException) -> str:
    """Returns the error in one line, then the last lines of its traceback, from the user's file on.

    A BadEnvironment says itself where it comes from, and of errors of several tasks the first is
    described. It is never longer than MAX_ERROR_CHARS.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    trace = error.__traceback__
    while trace is not None and not is_users_file(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    lines = traceback.format_exception(
        type(error), error, trace or error.__traceback__, limit=-MAX_FRAMES
    )
    if isinstance(error, BadEnvironment) and error.__cause__ is None:
        lines = lines[-1:]
    text = f"{lines[-1].strip()}\n{''.join(lines[:-1])}".strip()
    if len(text) <= MAX_ERROR_CHARS:
        return text
    return text[: MAX_ERROR_CHARS - 4] + " ..."


def raised(error: BaseException, function: Any) -> str:
    """Returns an error's type and text, and the last line of the function's file that it passed.

    Such as "KeyError: 'x' in mine.py:7".
    """
    text = "".join(traceback.format_exception_only(error)).strip()[:MAX_RAISED_CHARS]
    code = code_of(function)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if code and frame.filename == code.co_filename]
    if code is None or not lines:
        return text
    return f"{text} in {code.co_filename}:{lines[-1]}"


def located(function: Any, name: str) -> str:
    """Returns the name with the file and the line in which a user's function begins."""
    code = code_of(function)
    if code is None:
        return name
    return f"{name} ({code.co_filename}:{code.co_firstlineno})"


def parameters_of(function: Callable[..., Any]) -> inspect.Signature:
    """Returns a function's signature without what it returns, as sentences show it.

    Raises:
        TypeError, ValueError: it has none.
    """
    return inspect.signature(function).replace(return_annotation=inspect.Signature.empty)


def code_of(function: Any) -> CodeType | None:
    """Returns a function's code, a partial's or a callable object's too; None where it has none."""
    while isinstance(function, partial):
        function = function.func
    is_object = not hasattr(function, "__code__") and not isinstance(function, type)
    if is_object and callable(function):
        function = type(function).__call__
    return getattr(function, "__code__", None)
