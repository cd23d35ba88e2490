"""What runs where an environment lives: its agent, the calls that reach it, and the record of what each gave.

Invariant: user code never raises out of an `EnvServer`: whatever a call did, a `StepReply` comes back. Nothing here
imports torch, and of a step's `info` only numbers and the records of tool calls leave the place where it lives.
"""

import contextlib
import json
import math
import pickle
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any, Literal, get_args

from custom.agent import Trial, as_trial, play_trial
from custom.env import MAX_ERROR_CHARS, Message, Task, check_done, check_observation, check_reward, describe

Call = Literal["build", "trial", "reset", "step", "finish", "close"]
Failure = Literal["", "env_crash", "env_timeout"]
# Of a step's info.
MAX_NUMBERS, MAX_NAME_CHARS = 32, 64


@dataclass(frozen=True, kw_only=True)
class StepReply:
    """Holds what came of one call: it is made where the environment lives, and read by the turn loop.

    Attributes:
        messages: what the conversation goes on with.
        reward: of a step; of a finish the episode's own, None where the environment's rewards stand.
        done: the environment has ended.
        tool_calls: name, ok, error_kind and seconds of each.
        info: the numbers of a step's info.
        anchor: `environment.anchor()`, the state that the next turn begins in; None where the class has none.
        tools: of a build, the tools' schemas.
        trial: of a trial, what was seen.
        failure: the episode is over and its environment gone.
        error: why, in one line and the traceback's last ones.
        seconds: the call's own time, in which it computed or waited for something of its own; not that in which it
            waited for its turn, or for a processor.
    """

    messages: list[Message] = field(default_factory=list)
    reward: float | None = None
    done: bool = False
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    info: dict[str, float] = field(default_factory=dict)
    anchor: str | None = None
    tools: list[dict[str, Any]] | None = None
    trial: Trial | None = None
    failure: Failure = ""
    error: str = ""
    seconds: float = 0.0


def crashed(error: str, seconds: float = 0.0) -> StepReply:
    """Makes the reply of a call that failed; of a long error its beginning."""
    return StepReply(failure="env_crash", error=error[:MAX_ERROR_CHARS], seconds=seconds)


class EnvServer:
    """Holds one agent with its environment, and answers the calls that reach it."""

    agent: Any = None

    def call(self, kind: Call, args: tuple[Any, ...]) -> StepReply:
        """Runs one call; whatever it raises, SystemExit and KeyboardInterrupt included, becomes the reply's error."""
        started = own_clock()
        try:
            return replace(getattr(self, kind)(*args), seconds=own_clock() - started)
        except BaseException as error:
            return crashed(describe(error), own_clock() - started)

    def build(self, spec: Any) -> StepReply:
        """Makes the agent from its spec, pickled or not; replies with its tools."""
        self.agent = (pickle.loads(spec) if isinstance(spec, bytes) else spec).build()
        return StepReply(tools=self.agent.tool_schemas)

    def trial(self, seed: int, episodes: int, max_turn: int, task: Task | None = None) -> StepReply:
        """Plays a few episodes with random and with useless answers; replies with what they paid."""
        return StepReply(trial=play_trial(self.agent, seed, episodes, max_turn, task))

    def reset(self, seed: int, task: Task | None = None) -> StepReply:
        """Starts an episode; replies with its first messages."""
        return StepReply(messages=self.agent.reset(seed, task), anchor=self._anchor())

    def step(self, text: str) -> StepReply:
        """Plays what the policy wrote."""
        messages, reward, done, info = self.agent.step(text)
        told: dict[str, Any] = {"tool_calls": tool_calls(info), "info": numbers(info)}
        anchor = None if done else self._anchor()
        return StepReply(messages=messages, reward=float(reward), done=bool(done), anchor=anchor, **told)

    def _anchor(self) -> str | None:
        """Returns the environment's own name of the state it is in, where its class has one."""
        anchor = getattr(getattr(self.agent, "environment", None), "anchor", None)
        return str(anchor()) if callable(anchor) else None

    def finish(self, ending: str) -> StepReply:
        """Ends the episode; replies with its own reward, where there is one."""
        reward = self.agent.episode_reward(ending)
        return StepReply(reward=None if reward is None else float(reward), done=True)

    def close(self) -> StepReply:
        """Closes the agent, if there is one."""
        agent, self.agent = self.agent, None
        if agent is not None:
            agent.close()
        return StepReply(done=True)

    def answer(self, kind: Call, args: tuple[Any, ...]) -> bytes:
        """Runs `call` and writes the reply as JSON; one that cannot be written is an error of the environment."""
        reply = self.call(kind, args)
        try:
            return json.dumps(asdict(reply)).encode()
        except BaseException as error:
            text = f"what {kind} returned cannot be sent to another process: {describe(error)}"
            return json.dumps(asdict(crashed(text, reply.seconds))).encode()

    def serve(self, connection: Connection) -> None:
        """Answers calls until the agent is closed or nobody is there to ask."""
        kind = ""
        with contextlib.suppress(EOFError, OSError):
            while kind != "close":
                kind, args = pickle.loads(connection.recv_bytes())
                connection.send_bytes(self.answer(kind, args))
        self.call("close", ())


def own_clock(task: str = "thread-self") -> float:
    """Returns the seconds on a clock that stands still while a thread is ready to run and the machine runs others.

    Args:
        task: of Linux's /proc; where there is no such file the clock never stands still.
    """
    try:
        with open(f"/proc/{task}/schedstat") as file:
            return time.monotonic() - int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return time.monotonic()


def tool_calls(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Takes from a step's info the records of its tool calls, those that are well formed."""
    calls = info.get("tool_calls")
    kinds = {"name": str, "ok": bool, "error_kind": str, "seconds": float | int}
    return [
        {name: call[name] for name in kinds}
        for call in (calls if isinstance(calls, list | tuple) else ())
        if isinstance(call, Mapping) and all(isinstance(call.get(name), kind) for name, kind in kinds.items())
    ]


def numbers(info: Mapping[str, Any]) -> dict[str, float]:
    """Takes from a step's info its finite numbers, true being 1, under names that are not overly long; MAX_NUMBERS."""
    named = ((key, value) for key, value in info.items() if isinstance(key, str) and len(key) <= MAX_NAME_CHARS)
    found = {key: float(value) for key, value in named if isinstance(value, Real)}
    return {key: found[key] for key in islice((key for key in found if math.isfinite(found[key])), MAX_NUMBERS)}


def unpack(answer: bytes) -> StepReply:
    """Reads the reply that `EnvServer.answer` wrote, as data: code of the policy's may have run where it was made."""
    try:
        fields = json.loads(answer)
        reply = StepReply(**fields | {"trial": as_trial(fields["trial"])})
        check_observation(reply.messages, "the reply", max_chars=sys.maxsize)
        check_reward(0.0 if reply.reward is None else reply.reward, "the reply")
        check_done(reply.done, "the reply")
        if reply.failure not in get_args(Failure) or not isinstance(reply.error, str):
            raise ValueError(f"it says failure={reply.failure!r}, error={reply.error!r}")
        calls = tool_calls({"tool_calls": reply.tool_calls})
        return replace(reply, seconds=float(reply.seconds), tool_calls=calls, info=numbers(reply.info))
    # Whatever came is no reply.
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return crashed(f"the environment's home sent what is no reply: {type(error).__name__}: {error}")
