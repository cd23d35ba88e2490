"""verifiers' environments (0.4: a taskset, one agent, rewards of its tasks) as environments.

The library's own `Env.run` drives the episode, as a coroutine. Where it asks its agent for a reply
it puts what the agent hears into one queue and waits at another, and `play` does the opposite:

    Env.run -> SeatedPolicy._take_turn -> heard   -> start, play -> the policy
                                       <- replies <- play        <-

Invariant: the library decides who speaks when; its agent is played by the policy, turn by turn, and
the reward is what the task's own rewards give at the end.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np

from custom.env import BadEnvironment, Message, Observation
from features.adapters.base import Adapter, Step

# Rows that are read of a taskset without an end.
INFINITE_ROWS = 1000
# Characters of an exception that are shown.
MAX_ERROR_CHARS = 200


class VerifiersEnvironment(Adapter):
    """Plays `verifiers:NAME`: an installed environment of one agent, that only speaks.

    It has no tools, containers or judges.

    Args:
        identifier: the taskset's package (one for 0.4 or newer, that exports its Taskset), as in
            `eval NAME`.
        prompt_template: fields {name}, {prompt}, the row's last message.
        kwargs: the taskset's settings (its `--env.taskset.*`).
    A row is chosen by seed % number of rows; the agent's turns are limited as the environment says.
    Where its code raises, the episode ends with reward 0 and `info["error"]`.
    """

    TEMPLATE = "{prompt}"
    OVER = "The episode is over."
    # Belongs to the episode that is under way.
    loop: Any = None

    def __init__(self, identifier: str, **kwargs: Any) -> None:
        import verifiers.v1 as vf

        super().__init__(identifier, kwargs)
        config = vf.resolve_env_config({"taskset": {"id": identifier, **self.settings}})
        self.env = vf.load_environment(config)
        row_limit = None if self.env.taskset.bounded else INFINITE_ROWS
        self.tasks = list(islice(self.env.taskset, row_limit))
        if not self.tasks:
            raise ValueError("it has no rows")
        self.agent_name, self.agent_config = check_environment(self.env, self.tasks[0])
        self.max_turns = self.agent_config.max_turns
        if type(self.env).__name__ == "SingleAgentEnv":
            self.max_turns = 1

    def start(self, seed: int) -> Observation:
        """Starts the episode of the seed's row and returns its first messages."""
        self.close()
        self.loop = asyncio.new_event_loop()
        # Messages to the agent, None at the episode's end; and its replies.
        self.heard: asyncio.Queue[list[Message] | None] = asyncio.Queue()
        self.replies: asyncio.Queue[str] = asyncio.Queue()
        task = self.tasks[seed % len(self.tasks)]
        self.episode = self.loop.create_task(self._run_episode(task))
        messages = self.loop.run_until_complete(self.heard.get())
        if messages is None:
            error = self.episode.exception()
            raise BadEnvironment(
                f"verifiers:{self.name} ended before its agent's first turn: {error!r}"
            )
        messages[-1]["content"] = self.fill_prompt(prompt=messages[-1]["content"])
        return messages

    def play(self, action: str) -> Step:
        """Gives the environment its agent's reply and returns what it says next.

        The reward comes at the end.
        """
        # pydantic takes no lone surrogates.
        self.replies.put_nowait(action.encode("utf-8", "replace").decode("utf-8"))
        messages = self.loop.run_until_complete(self.heard.get())
        if messages is not None:
            return messages, 0.0, False, {}
        error = self.episode.exception()
        if error:
            return "", 0.0, True, {"error": repr(error)[:MAX_ERROR_CHARS]}
        return self._finish(self.episode.result())

    def _finish(self, traces: list[Any]) -> Step:
        """Returns the last step: the mean reward of the traces, and their metrics."""
        reward = 0.0
        if traces:
            reward = float(np.mean([trace.reward for trace in traces]))
        if not np.isfinite(reward):
            reward = 0.0
        metrics: dict[str, Any] = {}
        for trace in traces:
            metrics.update(trace.metrics)
        return "", reward, True, {"metrics": metrics}

    def close(self) -> None:
        """Drops an episode that is under way."""
        super().close()
        if self.loop is not None:
            self.episode.cancel()
            self.loop.run_until_complete(asyncio.gather(self.episode, return_exceptions=True))
            self.loop.close()
            self.loop = None

    async def _run_episode(self, task: Any) -> list[Any]:
        """Runs the library's episode with the policy as its agent; returns the finished traces."""
        import verifiers.v1 as vf

        episode = vf.Episode(task=_describe(task))

        def make_agent(name: str, config: Any) -> SeatedPolicy:
            return SeatedPolicy(self, episode.traces)

        agents: Any = vf.Agents(self.env.config, make_agent)
        try:
            await self.env.setup(agents)
            await self.env.run(task, agents)
            await self.env.finalize(task, episode)
        finally:
            self.heard.put_nowait(None)
        return episode.traces


@dataclass
class SeatedPolicy:
    """Stands for verifiers' Agent: its replies are the policy's.

    Attributes:
        environment: where the policy plays.
        finished: the episode's traces, to which this agent's are added.
        trainable: read by the library.
    """

    environment: VerifiersEnvironment
    finished: list[Any]
    trainable: bool = True

    async def run(self, task: Any, **_: Any) -> Any:
        """Takes the one reply to the task's prompt and returns the scored trace."""
        async with self.interaction(task) as exchange:
            await exchange.turn()
        return exchange.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator[Any]:
        """Stands for verifiers' Interaction, with `turn(message)` and `trace`.

        At its end the task scores the trace.
        """
        import verifiers.v1 as vf
        from verifiers.v1.state import state_cls

        agent = vf.AgentInfo(config=self.environment.agent_config, name=self.environment.agent_name)
        trace = vf.Trace(task=_describe(task), agent=agent, state=state_cls(type(task))())
        await task.setup(trace, None)
        yield SimpleNamespace(trace=trace, turn=partial(self._take_turn, task, trace))
        await task.finalize(trace, None)
        await task.score(trace)
        trace.is_completed = True
        trace.ok = True
        self.finished.append(trace)

    async def _take_turn(self, task: Any, trace: Any, message: Any = None) -> Any:
        """Sends the policy a message, and returns its reply as a Segment.

        The first time the message comes after the task's prompt.
        """
        import verifiers.v1 as vf
        from verifiers.v1.types import content_text

        if await self._is_over(task, trace):
            return vf.Segment(messages=[], terminated=True)
        messages = _messages_of_turn(task, trace, message)
        self.environment.heard.put_nowait(
            [{"role": one.role, "content": content_text(one.content)} for one in messages]
        )
        reply = vf.AssistantMessage(content=await self.environment.replies.get())
        for one in [*messages, reply]:
            parent = len(trace.nodes) - 1 if trace.nodes else None
            trace.nodes.append(vf.MessageNode(parent=parent, message=one, sampled=one is reply))
        return vf.Segment(messages=[reply])

    async def _is_over(self, task: Any, trace: Any) -> bool:
        """Stops the trace where one of the task's hooks says so, or its turns are used up."""
        import verifiers.v1 as vf
        from verifiers.v1.session import call_hook

        stops = []
        for hook in task.hooks("stop"):
            stops.append(await call_hook(hook, {"trace": trace, vf.Trace: trace}))
        limit = self.environment.agent_config.max_turns
        if any(stops):
            trace.stop("stop")
        elif limit is not None and trace.num_turns >= limit:
            trace.stop("max_turns")
        else:
            return False
        return True


def _messages_of_turn(task: Any, trace: Any, message: Any) -> list[Any]:
    """Returns what the agent hears in this turn, as the library's messages.

    That is the message, in the first turn after the task's system message and prompt.
    """
    import verifiers.v1 as vf

    parts = [message]
    messages: list[Any] = []
    if not trace.nodes:
        parts = [task.data.prompt, message]
        if task.data.system_prompt:
            messages.append(vf.SystemMessage(content=task.data.system_prompt))
    for part in parts:
        if isinstance(part, str):
            messages.append(vf.UserMessage(content=part))
        else:
            # Messages already, or None.
            messages += part or []
    return messages


def check_environment(env: Any, task: Any) -> tuple[str, Any]:
    """Returns the agent's name and config.

    Raises:
        ValueError: the environment needs more than a policy that speaks.
    """
    from verifiers.v1.configs.agent import agent_config_fields

    agents = agent_config_fields(env.config)
    if len(agents) > 1:
        _refuse("agents besides the policy, which need a model", list(agents))
    _refuse("judges, which need a model", [judge.reward_name for judge in task.plugged_judges()])
    _refuse("rewards that need a runtime", _rewards_with_runtime(task))
    tools = [*type(task).toolsets(task.config), *type(env.taskset).toolsets(env.taskset.config)]
    _refuse("tool servers", [type(tool).__name__ for tool in tools])
    if task.NEEDS_CONTAINER:
        _refuse("a container", [type(task).__name__])
    return next(iter(agents.items()))


def _refuse(need: str, names: list[str]) -> None:
    """Raises where the environment has any of what a policy that only speaks cannot give it."""
    if names:
        raise ValueError(f"it has {need}: {', '.join(names)}; allowed: one agent that only speaks")


def _rewards_with_runtime(task: Any) -> list[str]:
    """Returns the names of the rewards that have a parameter `runtime` without a default."""
    names = []
    for hook in task.hooks("reward"):
        parameter = inspect.signature(hook).parameters.get("runtime")
        if parameter and parameter.default is parameter.empty:
            names.append(hook.__name__)
    return names


def _describe(task: Any) -> Any:
    """Describes a task as the library's records do."""
    import verifiers.v1 as vf

    return vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
