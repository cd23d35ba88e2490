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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NoReturn, TypeAlias

from custom.asking import AskingLine, PolicyAnswer, Question, held, next_episode, trial_answers
from custom.coroutines import close_loop, finished
from custom.env import BadRewardFunction, NewHistory, Task
from custom.env_calls import Abandoned, describe
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
    texts,
    tool_calls,
    write_reply,
)

# Hands a part of a call on, which has questions, and waits for their answers.
Exchange: TypeAlias = Callable[[StepReply], Sequence[PolicyAnswer]]
# The calls of an episode, in which the policy may be asked.
OF_EPISODE = ("reset", "step", "finish")


class CannotAsk(RuntimeError):
    """Raised where the policy is asked by what is no call of an episode."""


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

    Attributes:
        exchange: hands questions to the policy on; None: there is nobody to hand them to.
    """

    agent: Any = None
    exchange: Exchange | None = None

    def __init__(self, stale_s: float = 0.0) -> None:
        self.clock = TaskClock(stale_s)
        self._episode = 0
        # A request over the connection that came in the place of answers.
        self._next_request: tuple[int, Call, tuple[Any, ...]] | None = None
        # Of the request that is being answered.
        self._number = 0
        self._pid = os.getpid()
        self._strays = StrayCount()

    def call(self, kind: Call, args: tuple[Any, ...]) -> StepReply:
        """Runs one call.

        Whatever it raises, SystemExit and KeyboardInterrupt included, becomes the reply's error.
        """
        task = f"self/task/{threading.get_native_id()}"
        self.clock.begin(task)
        if kind == "reset":
            self._episode = next_episode()
        line = AskingLine(lambda questions: self._ask(kind, task, line, questions), self._episode)
        try:
            with held(line):
                reply: StepReply = getattr(self, kind)(*args)
        except BadRewardFunction as error:
            reply = StepReply(failure="reward_fault", error=str(error))
        except BaseException as error:
            reply = crashed(describe(error))
        if os.getpid() != self._pid:
            self._end_stray(kind)
        # These replies no episode is given, and threads of a process share what was asked.
        usage = {} if kind in ("build", "close") else USAGE.take()
        return replace(
            reply,
            seconds=self.clock.end(),
            usage=usage,
            strays=self._strays.take(),
            paid=line.take_paid(),
        )

    def _ask(
        self, kind: Call, task: str, line: AskingLine, questions: Sequence[Question]
    ) -> Sequence[PolicyAnswer]:
        """Hands questions on that were asked in a call; the call's time stands still meanwhile.

        Raises:
            CannotAsk: the call is none of an episode.
            Abandoned: the call was given up.
        """
        if kind == "trial":
            return trial_answers(questions, line.asked)
        if kind not in OF_EPISODE or self.exchange is None or os.getpid() != self._pid:
            raise CannotAsk(
                f"the policy cannot be asked in {kind}: ask in a reset, a step or a reward_fn of "
                "an episode, in the process that runs it"
            )
        part = StepReply(
            questions=list(questions),
            paid=line.take_paid(),
            usage=USAGE.take(),
            strays=self._strays.take(),
            seconds=self.clock.end(),
        )
        try:
            return self.exchange(part)
        finally:
            self.clock.begin(task)

    def answer(self, kind: Call, args: tuple[Any, ...]) -> bytes:
        """Runs one call and returns the reply as JSON."""
        return write_reply(self.call(kind, args), kind)

    def serve(self, connection: Connection) -> None:
        """Answers calls until the agent is closed or nobody is there to ask."""
        # A child that the environment forks would read others' calls, and answer them.
        os.register_at_fork(after_in_child=connection.close)
        self.exchange = partial(self._exchange_over, connection)
        kind = ""
        with contextlib.suppress(EOFError, OSError):
            while kind != "close":
                request = self._next_request or pickle.loads(connection.recv_bytes())
                self._next_request = None
                self._number, kind, args = request
                reply = self.answer(kind, args)
                # A call that was given up is answered to nobody.
                if self._next_request is None:
                    connection.send_bytes(numbered(self._number, reply))
        self.call("close", ())

    def _exchange_over(self, connection: Connection, part: StepReply) -> Sequence[PolicyAnswer]:
        """Sends questions as the reply to the request at hand; the next one brings the answers.

        Raises:
            Abandoned: it brings none, as the call was given up.
        """
        try:
            connection.send_bytes(numbered(self._number, write_reply(part, "answer")))
            request = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            raise Abandoned from None
        number, kind, args = request
        if kind != "answer":
            self._next_request = request
            raise Abandoned
        self._number = number
        answers: Sequence[PolicyAnswer] = args[0]
        return answers

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
        return StepReply(
            messages=messages, texts=texts(self.agent.reset_info), anchor=self._anchor()
        )

    def step(self, text: str) -> StepReply:
        """Plays what the policy wrote."""
        messages, reward, done, info = self.agent.step(text)
        return StepReply(
            messages=list(messages),
            replaces_history=isinstance(messages, NewHistory),
            tool_calls=tool_calls(info),
            info=numbers(info),
            texts=texts(info),
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
        try:
            if agent is not None:
                agent.close()
        finally:
            close_loop()
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
        return str(finished(anchor())) if callable(anchor) else None


class SteppedServer:
    """Does as an `EnvServer` that is called from elsewhere, and whose calls may ask meanwhile.

    They run in a thread of their own, since a method has to return for its reply to be read.
    """

    def __init__(self) -> None:
        self._requests: SimpleQueue[tuple[Call, tuple[Any, ...]]] = SimpleQueue()
        self._replies: SimpleQueue[bytes] = SimpleQueue()
        self._next_request: tuple[Call, tuple[Any, ...]] | None = None
        self._server = EnvServer()
        self._server.exchange = self._exchange
        threading.Thread(target=self._serve, name="environment", daemon=True).start()

    def answer(self, kind: Call, args: tuple[Any, ...]) -> bytes:
        """Runs one call, or goes on with it, and returns its reply or its questions as JSON."""
        self._requests.put((kind, args))
        return self._replies.get()

    def _serve(self) -> None:
        while True:
            kind, args = self._next_request or self._requests.get()
            self._next_request = None
            reply = self._server.answer(kind, args)
            # A call that was given up is answered to nobody.
            if self._next_request is None:
                self._replies.put(reply)

    def _exchange(self, part: StepReply) -> Sequence[PolicyAnswer]:
        """Replies with questions; the next request brings the answers. Raises Abandoned."""
        self._replies.put(write_reply(part, "answer"))
        kind, args = self._requests.get()
        if kind != "answer":
            self._next_request = (kind, args)
            raise Abandoned
        answers: Sequence[PolicyAnswer] = args[0]
        return answers
