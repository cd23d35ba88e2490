"""The environment's side: the server that holds one agent and answers the calls that reach it.

It lives in a thread of the pool's process, in a process of its own, or in a Ray actor. Invariant:
user code never raises out of a server: whatever a call did, one `StepReply` comes back, from the
process that was asked. Nothing here imports torch.
"""

import contextlib
import mmap
import os
import pickle
import sys
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from custom.env import BadRewardFunction, NewHistory, Task
from custom.env_calls import describe
from custom.model_usage import USAGE
from custom.trial import play_trial
from data.loading import load_object
from workers.environments.clock import TaskClock
from workers.environments.reply import (
    Call,
    StepReply,
    crashed,
    numbered,
    numbers,
    task_name,
    tool_calls,
    write_reply,
)


class StrayCount:
    """Counts what forked children report, in memory that a process shares with them."""

    def __init__(self) -> None:
        # One byte each, so that children that report at the same time lose at most a count.
        self._memory = mmap.mmap(-1, 1)

    def add(self) -> None:
        """Counts one more, up to 255 that nobody has taken."""
        self._memory[0] = min(255, self._memory[0] + 1)

    def take(self) -> int:
        """Returns how many have been counted since the last look."""
        count = self._memory[0]
        if count:
            self._memory[0] = 0
        return count


class EnvServer:
    """Holds one agent with its environment; each kind of `Call` is a method.

    Args:
        stale_s: see `TaskClock`, which times the calls.
    """

    agent: Any = None

    def __init__(self, stale_s: float = 0.0) -> None:
        self.clock = TaskClock(stale_s)
        self._pid = os.getpid()
        self._strays = StrayCount()

    def call(self, kind: Call, args: tuple[Any, ...]) -> StepReply:
        """Runs one call.

        Whatever it raises, SystemExit and KeyboardInterrupt included, becomes the reply's error.
        """
        self.clock.begin(f"self/task/{threading.get_native_id()}")
        try:
            reply: StepReply = getattr(self, kind)(*args)
        except BadRewardFunction as error:
            reply = StepReply(failure="reward_fault", error=str(error))
        except BaseException as error:
            reply = crashed(describe(error))
        if os.getpid() != self._pid:
            self._end_stray(kind)
        # These replies no episode is given, and threads of a process share what was asked.
        usage = {} if kind in ("build", "close") else USAGE.take()
        return replace(reply, seconds=self.clock.end(), usage=usage, strays=self._strays.take())

    def answer(self, kind: Call, args: tuple[Any, ...]) -> bytes:
        """Runs one call and returns the reply as JSON."""
        return write_reply(self.call(kind, args), kind)

    def serve(self, connection: Connection) -> None:
        """Answers calls until the agent is closed or nobody is there to ask."""
        # A child that the environment forks would read others' calls, and answer them.
        os.register_at_fork(after_in_child=connection.close)
        kind = ""
        with contextlib.suppress(EOFError, OSError):
            while kind != "close":
                number, kind, args = pickle.loads(connection.recv_bytes())
                connection.send_bytes(numbered(number, self.answer(kind, args)))
        self.call("close", ())

    def build(self, spec: Any) -> StepReply:
        """Makes the agent from its spec, pickled or not; replies with its tools."""
        if isinstance(spec, bytes):
            spec = pickle.loads(spec)
        self.agent = spec.build()
        return StepReply(tools=self.agent.tool_schemas)

    def trial(self, seed: int, episodes: int, max_turn: int, task: Task | None = None) -> StepReply:
        """Plays a few episodes with random and useless answers; replies with what they paid."""
        return StepReply(trial=play_trial(self.agent, seed, episodes, max_turn, task))

    def run(self, *arguments: Any) -> StepReply:
        """Does a job that takes the place of an agent; replies with the reward that it returns."""
        reward = self.agent.run(*arguments)
        return StepReply(reward=None if reward is None else float(reward), done=True)

    def reset(self, seed: int, task: Task | None = None) -> StepReply:
        """Starts an episode; replies with its first messages."""
        messages = self.agent.reset(seed, task)
        return StepReply(messages=messages, anchor=self._anchor())

    def step(self, text: str) -> StepReply:
        """Plays what the policy wrote."""
        messages, reward, done, info = self.agent.step(text)
        return StepReply(
            messages=list(messages),
            replaces_history=isinstance(messages, NewHistory),
            tool_calls=tool_calls(info),
            info=numbers(info),
            task=task_name(info),
            anchor=None if done else self._anchor(),
            reward=float(reward),
            done=bool(done),
        )

    def visit(self, place: str, *arguments: Any) -> StepReply:
        """Calls a function with the agent, and replies with the text that it returns.

        Args:
            place: "module:function" of the project's, which a feature names.
        """
        return StepReply(said=str(load_object(place, "a visit")(self.agent, *arguments)))

    def restore(self, place: str, *arguments: Any) -> StepReply:
        """Begins an episode in its midst, by a function that puts the agent there."""
        return self.visit(place, *arguments)

    def finish(self, ending: str) -> StepReply:
        """Ends the episode; replies with its own reward, where there is one."""
        reward = self.agent.episode_reward(ending)
        return StepReply(reward=None if reward is None else float(reward), done=True)

    def close(self) -> StepReply:
        """Closes the agent, if there is one."""
        agent = self.agent
        self.agent = None
        if agent is not None:
            agent.close()
        return StepReply(done=True)

    def _end_stray(self, kind: Call) -> NoReturn:
        """Ends the process, a child that the environment forked and that came back from a call."""
        self._strays.add()
        agent = self.agent
        environment = type(getattr(agent, "environment", agent)).__name__
        with contextlib.suppress(Exception):
            print(
                f"environment {environment} forked in {kind}, and its child returned from there: "
                "the child is ended (end it by os._exit)",
                file=sys.stderr,
                flush=True,
            )
        # Nothing here is the child's: not the pool's threads, nor what is closed at exit.
        os._exit(1)

    def _anchor(self) -> str | None:
        """Returns the environment's own name of the state it is in, where its class has one."""
        environment = getattr(self.agent, "environment", None)
        anchor = getattr(environment, "anchor", None)
        return str(anchor()) if callable(anchor) else None
