"""Environments: what a user writes, and the boundary at which the framework calls it.

An environment is a game of text: `reset` gives the first observation, `step` answers an action. Nothing here knows
tokens, models or agents. Invariant: what passes the boundary (`reset_environment`, `step_environment`) is well formed,
that is text that can be encoded, of bounded length, with a reward that float32 holds; anything else raises
`BadEnvironment`, which says what came and what is allowed.
"""

import inspect
import random
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

MAX_OBSERVATION_CHARS = 20_000
MAX_ERROR_CHARS = 2_000
MAX_MESSAGES, MAX_NAME = 1_000, 200
LARGEST_REWARD = float(np.finfo(np.float32).max)
ROLES = ("system", "user", "assistant", "tool")
# The keys of a message that chat templates read.
MESSAGE_KEYS = ("role", "content", "name", "tool_call_id")
# What `reset` and `step` may return, for error messages.
OBSERVATIONS = (
    f"a string, or a list of messages {{'role': one of {', '.join(ROLES)}, 'content': string}}"
)
STEPS = "(observation, reward, done, info) or (observation, reward, terminated, truncated, info)"

Message: TypeAlias = dict[str, str]
Observation: TypeAlias = str | list[Message]
# What an episode is given beside its seed: a row of a dataset.
Task: TypeAlias = Mapping[str, Any]


class Abandoned(BaseException):
    """Ends a call from inside its thread when it has overrun its deadline.

    It is a BaseException, so that `except Exception` does not stop it.
    """

    def __str__(self) -> str:
        return "still running after its deadline"


class BadEnvironment(ValueError):
    """Says that what an environment, an agent or a reward function returned cannot be used."""


@dataclass
class EnvironmentConfig:
    """Holds an environment's parameters: subclass it with fields of your own, and name the subclass as `config_cls`."""


class BaseEnvironment(ABC):
    """Plays a game of text: write `reset` and `step`; the rest is optional.

    class Coin(BaseEnvironment):
        def reset(self, seed=None):
            self.side = random.Random(seed).choice(["heads", "tails"])
            return "I threw a coin. Heads or tails?"

        def step(self, action):  # (observation, reward, done, info), or gymnasium's five values
            return f"It was {self.side}.", float(self.side in action.lower()), True, {}

    `config` is an instance of `config_cls`, by default with its default values.
    """

    config_cls: ClassVar[type[EnvironmentConfig]] = EnvironmentConfig
    # The most turns that an episode can last by the game's own rules; None: unknown.
    max_turns: int | None = None
    _done: bool = False

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        # A bare EnvironmentConfig says nothing, so that it stands for the defaults of any environment.
        self.config: Any = (
            self.config_cls() if config is None or type(config) is EnvironmentConfig else config
        )

    @abstractmethod
    def reset(self, seed: int | None = None) -> Any:
        """Starts an episode and returns the first observation; equal seeds give equal episodes.

        It may leave `seed` out of its signature, and may return gymnasium's (observation, info).
        """

    @abstractmethod
    def step(self, action: str) -> tuple[Any, ...]:
        """Plays an action and returns (observation, reward, done, info), or gymnasium's five values.

        Those are (observation, reward, terminated, truncated, info).
        """

    def get_state_description(self) -> str:
        """Returns context that is added to each observation which does not already contain it."""
        return ""

    def get_prompt_prefix(self) -> str:
        """Returns the system prompt; empty: none."""
        return ""

    def sample_action(self, generator: random.Random) -> str | None:
        """Returns a readable action drawn at random, for the trial at a run's start; None: unknown."""
        return None

    def close(self) -> None:
        """Frees what the environment holds; called once, also after an episode that failed."""
        self._done = True


class StepResult(NamedTuple):
    """Holds the four values of a step, checked: an environment's, or an agent's, whose observation is messages."""

    observation: Observation
    reward: float
    done: bool
    info: dict[str, Any]


@dataclass
class Trajectory:
    """Holds one episode: `states[t]` is what the policy saw before `actions[t]`; a last state follows the last action.

    states   = s0 s1 s2     # one more than actions
    actions  = a0 a1
    rewards  = r0 r1        # the environment's own, also where a reward_fn replaces them
    ending   = done         # or max_turns, overflow, …; empty while the episode runs
    """

    states: list[Observation] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    dones: list[bool] = field(default_factory=list)
    infos: list[dict[str, Any]] = field(default_factory=list)
    seed: int | None = None
    ending: str = ""

    def __len__(self) -> int:
        """Counts the turns so far."""
        return len(self.actions)

    def record(self, action: str, step: StepResult) -> None:
        """Adds an action and what came of it."""
        columns: tuple[list[Any], ...] = (
            self.actions,
            self.states,
            self.rewards,
            self.dones,
            self.infos,
        )
        for column, value in zip(columns, (action, *step), strict=True):
            column.append(value)


# --- The boundary ---


def reset_environment(
    env: Any, seed: int | None, max_chars: int = MAX_OBSERVATION_CHARS, task: Task | None = None
) -> Observation:
    """Starts an episode and returns its first observation, checked and cut to `max_chars`.

    The seed goes to `reset(seed=…)` where its signature takes one; else Python's and numpy's global generators are
    seeded for this call and put back after it. Those are shared by threads: steps that draw from them, and other
    threads that do, are not reproducible. Of a task `reset` is given the entries that its signature takes.
    """
    task, where = task or {}, f"{type(env).__name__}.reset"
    offered = ({} if seed is None else {"seed": seed}) | dict(task)
    given = {name: value for name, value in offered.items() if takes_keyword(env.reset, name)}
    if task and given.keys().isdisjoint(task):
        raise BadEnvironment(
            f"{where} takes none of {', '.join(task)}, which the dataset's rows have"
        )
    # An object that is no BaseEnvironment may take no attributes.
    with suppress(AttributeError):
        env._done = False
    with nullcontext() if seed is None or "seed" in given else OwnGenerators(seed).installed():
        answer = env.reset(**given)
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping):
        answer = answer[0]
    if isinstance(answer, list) and not answer:
        raise BadEnvironment(f"{where} returned no message; allowed: a string, or messages")
    return check_observation(answer, located(env.reset, where), max_chars)


def step_environment(env: Any, action: str, max_chars: int = MAX_OBSERVATION_CHARS) -> StepResult:
    """Plays one step and checks what it returns, four values or gymnasium's five; else BadEnvironment."""
    return check_step(env.step(action), located(env.step, f"{type(env).__name__}.step"), max_chars)


def check_step(answer: Any, where: str, max_chars: int = MAX_OBSERVATION_CHARS) -> StepResult:
    """Returns what a step gave, four values or gymnasium's five, as checked values; else BadEnvironment."""
    if not isinstance(answer, tuple | list) or len(answer) not in (4, 5):
        raise BadEnvironment(f"{where} returned {shown(answer)}; allowed: {STEPS}")
    observation, reward, *dones, info = answer
    if info is not None and not isinstance(info, Mapping):
        raise BadEnvironment(f"{where} returned the info {shown(info)}; allowed: a dict")
    endings = [check_done(done, where) for done in dones]
    seen, paid = check_observation(observation, where, max_chars), check_reward(reward, where)
    return StepResult(seen, paid, any(endings), dict(info or {}))


def check_observation(
    observation: Any, where: str, max_chars: int = MAX_OBSERVATION_CHARS
) -> Observation:
    """Returns text, or chat messages, that a tokenizer can encode, at most `max_chars` long; else BadEnvironment."""
    if isinstance(observation, str):
        return cut_middle(_encodable(observation), max_chars)
    if not isinstance(observation, list) or not all(
        _is_message(message) for message in observation
    ):
        raise BadEnvironment(
            f"{where} returned the observation {shown(observation)}; allowed: {OBSERVATIONS}"
        )
    if len(observation) > MAX_MESSAGES:
        raise BadEnvironment(
            f"{where} returned {len(observation)} messages; allowed: {MAX_MESSAGES}"
        )
    return [
        {
            name: _encodable(text[:MAX_NAME])
            for name in MESSAGE_KEYS
            if isinstance(text := message.get(name), str)
        }
        | {"content": cut_middle(_encodable(message["content"]), max_chars // len(observation))}
        for message in observation
    ]


def check_reward(reward: Any, where: str) -> float:
    """Returns a number (also numpy's and tensors of one element) that float32 holds; else BadEnvironment."""
    value = float("nan")
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        value = value if isinstance(reward, str | bytes | bytearray) else float(reward)
    if not abs(value) <= LARGEST_REWARD:
        raise BadEnvironment(
            f"{where} returned the reward {shown(reward)}; allowed: a finite number"
        )
    return value


def check_done(done: Any, where: str) -> bool:
    """Returns True or False, given also as numpy's or as 1 or 0; else BadEnvironment."""
    if isinstance(done, bool | np.bool_) or (isinstance(done, int | np.integer) and done in (0, 1)):
        return bool(done)
    raise BadEnvironment(f"{where} returned done={shown(done)}; allowed: True or False")


def cut_middle(text: str, max_chars: int) -> str:
    """Returns the text; where it is longer, its beginning and end around a mark, `max_chars` characters in all."""
    if len(text) <= max_chars:
        return text
    mark = f"\n[… {len(text) - max_chars:,} characters or more left out …]\n"
    kept = max(max_chars - len(mark), 0)
    return (text[: (kept + 1) // 2] + mark + text[len(text) - kept // 2 :])[:max_chars]


def shown(value: Any) -> str:
    """Writes any value, shortened to 100 characters, and its type for an error message; never raises."""
    try:
        text = repr(value)
    # A user's __repr__ may do anything, and Python writes no int of more than 4,300 digits.
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"
    return f"{text[:100]}{'…' if len(text) > 100 else ''} ({type(value).__name__})"


def describe(error: BaseException) -> str:
    """Says the error in one line, then the last lines of its traceback; never longer than MAX_ERROR_CHARS."""
    lines = traceback.format_exception(error, limit=-4)
    text = f"{lines[-1].strip()}\n{''.join(lines[:-1])}".strip()
    return text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 4] + " ..."


def located(function: Any, name: str) -> str:
    """Returns the name with the file and the line in which a user's function begins."""
    code = getattr(function, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def takes_keyword(function: Callable[..., Any], name: str) -> bool:
    """Says whether the function can be called with `name=`."""
    parameters = inspect.signature(function).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(
        (p.name == name and p.kind in by_name) or p.kind is p.VAR_KEYWORD for p in parameters
    )


def call_method(thing: Any, method: str, *arguments: Any) -> Any:
    """Calls the method; None where there is no such method."""
    call = getattr(thing, method, None)
    return call(*arguments) if callable(call) else None


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in ROLES
        and isinstance(message.get("content"), str)
    )


def _encodable(text: str) -> str:
    """Replaces each lone surrogate, which no tokenizer takes, by a question mark."""
    return str(text) if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


_GLOBAL_GENERATORS = threading.RLock()


class OwnGenerators:
    """Keeps Python's and numpy's global generators for one environment: seeded, and apart from everybody else's.

    with generators.installed(): the code inside draws from `random` and `np.random` where it left off the last time.
    One thread at a time has its own installed, and the others wait for it, or equal seeds would not give equal tasks.
    A call that hangs in there therefore holds all others up; in a process of its own it holds up nobody.
    """

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Installs these states, and puts the others' back at the end, also after an exception."""
        with _GLOBAL_GENERATORS:
            others_python, others_numpy = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(others_python)
                np.random.set_state(others_numpy)
