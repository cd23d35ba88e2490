"""The pool that runs programs: their server, their processes and their deadlines, in one thread.

    caller's thread    reset, answer, finish ------------------------------------------> poll
    the pool's         server <--HTTP-- program;  launcher: processes;  deadlines ------^

It stands in the place of an environment pool: `reset` starts an episode's program, what the program
asks comes back by `poll` as events, `answer` answers, and `finish` ends it and gives a reward
function's reward. Invariant: of every attempt `Exited` is told once, and `finish` is replied to
once; then nothing of it runs any more.
"""

import asyncio
import contextlib
import json
import os
import queue
import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from custom.confine import remove_folder
from custom.env_calls import describe
from custom.model_usage import USAGE, Counts, add_counts
from custom.side_services import set_up_services
from custom.tools.parsers import ActionParser, get_parser
from data.turn_tokens import Tools
from features.programs.attempt import Attempt, Deadlines
from features.programs.exchange import Answer, Json, ProgramEvent
from features.programs.in_process import FunctionSpec
from features.programs.jobs import HomesMaker, Jobs
from features.programs.launcher import MARK, CannotStart, Launcher, Program
from features.programs.recall import Recall
from features.programs.report import NOTHING, NoReward, ProgramReport, report_of_output
from features.programs.rewards import RewardSpec
from features.programs.server import ProgramServer
from features.programs.spec import ProgramSpec
from features.programs.task_folders import TaskFolders, python_path, with_whole_paths
from features.programs.task_words import NoSuchWord, with_task
from workers.environments.clock import waited_for_processor
from workers.environments.pool import EnvironmentPool
from workers.environments.reply import StepReply
from workers.rollout.mixed_pool import Replies, take_new

# Lines of a program's errors that its record keeps, and characters of its output.
KEPT_LINES = 20
KEPT_CHARS = 2000
# A longer variable no process may be given; the task then stands on standard input alone.
MAX_VARIABLE_BYTES = 100_000
# The longest that ending everything may take, in seconds.
STOP_S = 15.0


class ProgramPool(contextlib.AbstractContextManager["ProgramPool", None]):
    """Runs programs.

    Its owner's thread calls, and no call blocks but `poll` and `shutdown`.

    Args:
        specs: of the programs, by their index among all specs.
        deadlines: of a program's own time.
        max_tokens: of the longest row.
        host, port: of the server; port 0: any that is free.
        homes: makes an environment pool, in which functions then run: a program's own, and those
            that give rewards.
        replies: where events and replies go.
    """

    def __init__(
        self,
        specs: dict[int, ProgramSpec],
        *,
        deadlines: Deadlines,
        max_tokens: int,
        host: str = "127.0.0.1",
        port: int = 0,
        homes: HomesMaker = EnvironmentPool,
        replies: Replies | None = None,
    ) -> None:
        self._specs = specs
        for spec in specs.values():
            set_up_services(spec.services)
        self._homes = homes
        self._functions: dict[str, Jobs] = {}
        self._rewards: dict[str, Jobs] = {}
        self._deadlines = deadlines
        self._replies: Replies = queue.SimpleQueue() if replies is None else replies
        self._attempts: dict[int, Attempt] = {}
        # The call that ends the program of each attempt that runs one.
        self._kills: dict[int, Callable[[], None]] = {}
        self._launchers: dict[tuple[Any, ...], Launcher] = {}
        self._folders: TaskFolders | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        lasting = {spec.token for spec in specs.values() if spec.token is not None}
        self._server = ProgramServer(max_tokens, port, host, lasting_tokens=lasting)
        self._closed = False
        # Calls that the owner's thread wants, and whether this thread was woken for them.
        self._calls: deque[tuple[Any, ...]] = deque()
        self._is_woken = False
        started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), name="programs", daemon=True
        )
        self._thread.start()
        problem = started.get()
        if problem is not None:
            raise problem

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # The caller's side

    def reset(self, key: int, spec_index: int, seed: int, task: Json | None = None) -> None:
        """Starts an episode's program."""
        text = json.dumps(task or {}, default=as_plain)
        self._call(self._begin, key, self._specs[spec_index], seed, text)

    def answer(self, key: int, number: int, answer: Answer) -> None:
        """Answers a request of an episode's program."""
        self._call(self._answer, key, number, answer)

    def finish(self, key: int, ending: str) -> None:
        """Ends an episode's program, if it still runs; its reply has a reward function's reward."""
        self._call(self._finish, key)

    @property
    def tool_schemas(self) -> list[Tools]:
        """Lists each spec's tools: none, as a program brings its own with each request."""
        return [None] * len(self._specs)

    def url(self, token: str) -> str:
        """Returns where an attempt is served, without the protocols' `/v1`."""
        return self._server.url(token)

    def poll(self, timeout: float) -> list[tuple[Any, Any]]:
        """Returns the new events and replies; waits for the first at most `timeout` seconds."""
        return take_new(self._replies, timeout)

    def shutdown(self) -> None:
        """Ends all programs, and the server."""
        if self._closed:
            return
        self._closed = True
        self._call(self._stopping.set)
        self._thread.join(STOP_S)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Has a function called in the pool's thread.

        That thread is woken once for what comes at the same time. Each time would hand it the
        interpreter, and the answers of an engine's step would be sent one by one, while the engine
        waits for its next step.
        """
        self._calls.append((function, *arguments))
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._take_calls)

    # The pool's thread

    def _take_calls(self) -> None:
        # Before the calls are taken, so that one that comes meanwhile wakes again.
        self._is_woken = False
        while self._calls:
            self._loop.call_soon(*self._calls.popleft())

    async def _serve(self, started: "queue.SimpleQueue[BaseException | None]") -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        try:
            await self._server.start()
        # The caller raises it.
        except BaseException as error:
            started.put(error)
            return
        started.put(None)
        await self._stopping.wait()
        for attempt in self._attempts.values():
            attempt.end_requests()
        await self._server.stop()
        for launcher in self._launchers.values():
            launcher.stop()
        for jobs in [*self._functions.values(), *self._rewards.values()]:
            await jobs.close()
        for task in self._tasks:
            task.cancel()
        if self._folders is not None:
            self._folders.close()

    def _begin(self, key: int, spec: ProgramSpec, seed: int, task: str) -> None:
        attempt = Attempt(
            key=key,
            spec=spec,
            seed=seed,
            task=task,
            token=spec.token or secrets.token_urlsafe(24),
            recall=Recall(parser_of(spec), spec.dropped_thinking == "recalled"),
            deadlines=self._deadlines,
            tell=self._tell,
            kill=lambda: self._kill(key),
        )
        if spec.has_folder and not spec.is_by_hand:
            if self._folders is None:
                self._folders = TaskFolders()
            attempt.folder = self._folders.make()
        self._attempts[key] = attempt
        self._server.register(attempt)
        self._spawn(self._run(attempt))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Does something that waits, meanwhile."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tell(self, key: int, event: ProgramEvent) -> None:
        self._replies.put((key, event))

    def _answer(self, key: int, number: int, answer: Answer) -> None:
        attempt = self._attempts.get(key)
        if attempt is not None:
            attempt.take_answer(number, answer)

    def _finish(self, key: int) -> None:
        """Replies to the end of an episode whose program is gone."""
        attempt = self._attempts.pop(key)
        self._server.forget(attempt)
        if attempt.spec.reward_path is None or attempt.has_failed:
            self._replies.put((key, StepReply(done=True, usage=asked_of_models(attempt))))
            self._empty(attempt)
        else:
            self._spawn(self._score(attempt))

    async def _score(self, attempt: Attempt) -> None:
        """Replies with a reward function's reward."""
        spec = attempt.spec
        assert spec.reward_path is not None
        source = f"{spec.reward_path}:{spec.reward_name}"
        if source not in self._rewards:
            function = RewardSpec(
                spec.reward_path, spec.reward_name, spec.reward_kwargs, spec.services
            )
            self._rewards[source] = Jobs(function, self._homes)
        arguments = (
            json.loads(attempt.task),
            attempt.output,
            attempt.conversations(),
            attempt.folder,
        )
        reply = await self._rewards[source].run(attempt.key, *arguments)
        add_counts(attempt.usage, reply.usage)
        usage = asked_of_models(attempt)
        self._replies.put((attempt.key, replace(reply, usage=usage)))
        self._empty(attempt)

    def _empty(self, attempt: Attempt) -> None:
        """Removes what a program has left in its folder."""
        if attempt.folder:
            self._loop.run_in_executor(None, remove_folder, Path(attempt.folder))

    def _kill(self, key: int) -> None:
        kill = self._kills.get(key)
        if kill is not None:
            kill()

    async def _run(self, attempt: Attempt) -> None:
        """Runs a program to its end, and tells of it."""
        attempt.start_clock()
        run = self._run_command
        if attempt.spec.is_by_hand:
            run = self._wait_for_the_end
        elif attempt.spec.function is not None:
            run = self._run_function
        try:
            await run(attempt)
        except CannotStart as error:
            attempt.tell_exit(report=NOTHING, crash=str(error), record={})
        except OSError as error:
            attempt.tell_exit(report=NOTHING, crash=describe(error), record={})
        finally:
            self._kills.pop(attempt.key, None)

    async def _wait_for_the_end(self, attempt: Attempt) -> None:
        """Waits until somebody says that an episode has ended, which nothing was started for."""
        reward = await attempt.left
        attempt.tell_exit(report=ProgramReport(reward=reward), crash="", record={})

    async def _run_command(self, attempt: Attempt) -> None:
        program = await self._start(attempt)
        self._kills[attempt.key] = program.kill
        attempt.waited = partial(waited_for_processor, str(program.pid))
        if attempt.failure:
            program.kill()
        await program.wait()
        attempt.output = text_of(program.output)
        report, crash = outcome(attempt, program)
        attempt.tell_exit(report=report, crash=crash, record=record_of(program))

    async def _run_function(self, attempt: Attempt) -> None:
        source = str(attempt.spec.function)
        if source not in self._functions:
            function = FunctionSpec.of(source, attempt.spec.services)
            self._functions[source] = Jobs(function, self._homes, has_deadline=False)
        jobs = self._functions[source]
        self._kills[attempt.key] = lambda: jobs.give_up(attempt.key)
        base_url = f"{self._server.url(attempt.token)}/v1"
        arguments = (attempt.task, attempt.seed, base_url, attempt.token, attempt.folder)
        reply = await jobs.run(attempt.key, *arguments)
        add_counts(attempt.usage, reply.usage)
        attempt.tell_exit(report=ProgramReport(reward=reply.reward), crash=reply.error, record={})

    async def _start(self, attempt: Attempt) -> Program:
        spec = attempt.spec
        try:
            argv = with_task(with_whole_paths(spec.command), attempt.task)
        except NoSuchWord as error:
            raise CannotStart(str(error)) from None
        python = sys.executable
        if spec.preload:
            python = argv.pop(0)
        where = (python, spec.preload, spec.variables)
        if where in self._launchers and self._launchers[where].is_lost:
            # Its death cost the programs of its time alone.
            self._launchers.pop(where).stop()
        if where not in self._launchers:
            self._launchers[where] = Launcher(
                python, spec.preload, spec.memory_gb, dict(spec.variables)
            )
        environment = environment_of(attempt, self._server.url(attempt.token))
        input = attempt.task.encode() + b"\n"
        return await self._launchers[where].start(argv, environment, input, attempt.folder)


def parser_of(spec: ProgramSpec) -> ActionParser:
    """Returns what reads the policy's calls in a program's answers."""
    return get_parser(spec.parser) if isinstance(spec.parser, str) else spec.parser


def environment_of(attempt: Attempt, url: str) -> dict[str, str]:
    """Returns all of a program's environment variables."""
    direct = dict.fromkeys(["127.0.0.1", "localhost", str(urlsplit(url).hostname)])
    no_proxy = ",".join([*direct, *os.environ.get("NO_PROXY", "").split(",")]).rstrip(",")
    environment = {
        "PYTHONHASHSEED": "0",
        **os.environ,
        **dict(attempt.spec.variables),
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": attempt.token,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": attempt.token,
        "SEED": str(attempt.seed),
        MARK: attempt.token,
        # Not through a proxy of the machine's.
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        # The SDK of OpenAI's agents sends what happens to its maker otherwise.
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
    }
    if len(attempt.task.encode()) <= MAX_VARIABLE_BYTES:
        environment["TASK"] = attempt.task
    if attempt.folder:
        environment |= {"TASK_DIR": attempt.folder, "START_DIR": os.getcwd()}
        folders = python_path(attempt.spec.command, environment.get("PYTHONPATH", ""))
        if folders:
            environment["PYTHONPATH"] = folders
    return environment


def asked_of_models(attempt: Attempt) -> Counts:
    """Returns what an ended attempt asked of the models beside the policy.

    What programs asked through the server is counted in this process; of those that run side by
    side the first to end has it all.
    """
    usage: Counts = {}
    add_counts(usage, attempt.usage)
    add_counts(usage, USAGE.take())
    return usage


def outcome(attempt: Attempt, program: Program) -> tuple[ProgramReport, str]:
    """Returns what an ended program earned, and why its end is a failure; "": it is none."""
    code = program.exit_code or 0
    if code < 0:
        if attempt.is_cut_short and "ended" in attempt.limits and pays_by_output(attempt):
            # It has had its turns, and may have said what it earned before it was ended.
            with contextlib.suppress(NoReward):
                return report_of_output(text_of(program.output)), ""
        return NOTHING, f"the program was ended by signal {-code}{shown_errors(program)}"
    if attempt.spec.reward == "exit_code":
        return ProgramReport(reward=float(code == 0)), ""
    if code:
        return NOTHING, f"the program ended with exit code {code}{shown_errors(program)}"
    if attempt.spec.reward_path is not None:
        return NOTHING, ""
    try:
        return report_of_output(text_of(program.output)), ""
    except NoReward as error:
        if attempt.reward_told:
            return NOTHING, ""
        return NOTHING, f"{error}{shown_errors(program)}"


def pays_by_output(attempt: Attempt) -> bool:
    """Returns whether a program says itself what it earned."""
    return attempt.spec.reward == "stdout" and attempt.spec.reward_path is None


def record_of(program: Program) -> Json:
    """Returns what an episode's record keeps of a program."""
    return {
        "exit_code": program.exit_code,
        "output": text_of(program.output)[-KEPT_CHARS:],
        "errors": last_lines(program),
    }


def shown_errors(program: Program) -> str:
    """Returns the last lines of a program's errors, for a message."""
    lines = last_lines(program)
    return f":\n{lines}" if lines else ", and wrote nothing to standard error"


def last_lines(program: Program) -> str:
    """Returns the last lines that a program wrote to standard error."""
    return "\n".join(text_of(program.errors).strip().splitlines()[-KEPT_LINES:])


def text_of(output: bytes) -> str:
    """Reads output as text, whatever it is."""
    return output.decode("utf-8", "replace")


def as_plain(value: Any) -> Any:
    """Makes JSON of what a dataset's row may hold beside it: arrays and their numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)
