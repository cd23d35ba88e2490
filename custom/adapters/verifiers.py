"""verifiers' environments (0.4: a taskset, one agent, rewards of its tasks) as environments.

Invariant: the library's own `Env.run` decides who speaks when; its agent is played by the policy, turn by turn, and
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

from custom.adapters.base import Adapter, Step
from custom.env import BadEnvironment, Message, Observation

# Rows that are read of a taskset without an end.
INFINITE_ROWS = 1000


class VerifiersEnvironment(Adapter):
    """Plays `verifiers:NAME`: an installed environment of one agent, without tools, containers or judges.

    Args:
        identifier: the taskset's package (one for 0.4 or newer, that exports its Taskset), as in `eval NAME`.
        prompt_template: fields {name}, {prompt}, the row's last message.
        kwargs: the taskset's settings (its `--env.taskset.*`).
    A row is chosen by seed % number of rows; the agent's turns are limited as the environment says. Where its code
    raises, the episode ends with reward 0 and `info["error"]`.
    """

    TEMPLATE, OVER = "{prompt}", "The episode is over."
    loop: Any = None

    def __init__(self, identifier: str, **kwargs: Any) -> None:
        import verifiers.v1 as vf

        super().__init__(identifier, kwargs)
        self.env = vf.load_environment(
            vf.resolve_env_config({"taskset": {"id": identifier, **self.settings}})
        )
        self.tasks = list(
            islice(self.env.taskset, None if self.env.taskset.bounded else INFINITE_ROWS)
        )
        if not self.tasks:
            raise ValueError("it has no rows")
        self.agent_name, self.agent_config = check_environment(self.env, self.tasks[0])
        self.max_turns = (
            1 if type(self.env).__name__ == "SingleAgentEnv" else self.agent_config.max_turns
        )

    def start(self, seed: int) -> Observation:
        """Starts the episode of the seed's row and returns its first messages."""
        self.close()
        self.loop = asyncio.new_event_loop()
        # What the agent is told, None at the episode's end; and what it answers.
        self.asked: asyncio.Queue[list[Message] | None] = asyncio.Queue()
        self.answers: asyncio.Queue[str] = asyncio.Queue()
        self.episode = self.loop.create_task(self._play(self.tasks[seed % len(self.tasks)]))
        messages = self.loop.run_until_complete(self.asked.get())
        if messages is None:
            error = self.episode.exception()
            raise BadEnvironment(
                f"verifiers:{self.name} ended before its agent's first turn: {error!r}"
            )
        messages[-1]["content"] = self.fill_prompt(prompt=messages[-1]["content"])
        return messages

    def play(self, action: str) -> Step:
        """Gives the environment its agent's reply and returns what it says next; the reward comes at the end."""
        # pydantic takes no lone surrogates.
        self.answers.put_nowait(action.encode("utf-8", "replace").decode("utf-8"))
        messages = self.loop.run_until_complete(self.asked.get())
        if messages is not None:
            return messages, 0.0, False, {}
        if error := self.episode.exception():
            return "", 0.0, True, {"error": repr(error)[:200]}
        traces = self.episode.result()
        reward = float(np.mean([trace.reward for trace in traces])) if traces else 0.0
        info = {
            "metrics": {name: value for trace in traces for name, value in trace.metrics.items()}
        }
        return "", reward if np.isfinite(reward) else 0.0, True, info

    def close(self) -> None:
        """Drops an episode that is under way."""
        super().close()
        if self.loop is not None:
            self.episode.cancel()
            self.loop.run_until_complete(asyncio.gather(self.episode, return_exceptions=True))
            self.loop.close()
            self.loop = None

    async def _play(self, task: Any) -> list[Any]:
        """Plays the library's episode with the policy in its seat and returns the finished traces."""
        import verifiers.v1 as vf

        episode = vf.Episode(task=_row(task))
        agents: Any = vf.Agents(self.env.config, lambda name, config: Seat(self, episode.traces))
        try:
            await self.env.setup(agents)
            await self.env.run(task, agents)
            await self.env.finalize(task, episode)
        finally:
            self.asked.put_nowait(None)
        return episode.traces


@dataclass
class Seat:
    """Stands for verifiers' Agent: its replies are the policy's."""

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
        """Stands for verifiers' Interaction, with `turn(message)` and `trace`; at its end the task scores it."""
        import verifiers.v1 as vf
        from verifiers.v1.state import state_cls

        agent = vf.AgentInfo(config=self.environment.agent_config, name=self.environment.agent_name)
        trace = vf.Trace(task=_row(task), agent=agent, state=state_cls(type(task))())
        await task.setup(trace, None)
        yield SimpleNamespace(trace=trace, turn=partial(self._turn, task, trace))
        await task.finalize(trace, None)
        await task.score(trace)
        trace.is_completed = trace.ok = True
        self.finished.append(trace)

    async def _turn(self, task: Any, trace: Any, message: Any = None) -> Any:
        """Says the message, after the task's prompt the first time, and returns the reply as a Segment."""
        import verifiers.v1 as vf
        from verifiers.v1.session import call_hook
        from verifiers.v1.types import content_text

        limit = self.environment.agent_config.max_turns
        over = any(
            [
                await call_hook(stop, {"trace": trace, vf.Trace: trace})
                for stop in task.hooks("stop")
            ]
        )
        if over or (limit is not None and trace.num_turns >= limit):
            trace.stop("stop" if over else "max_turns")
            return vf.Segment(messages=[], terminated=True)
        said: list[Any] = []
        for part in [message] if trace.nodes else [task.data.prompt, message]:
            said += [vf.UserMessage(content=part)] if isinstance(part, str) else part or []
        if task.data.system_prompt and not trace.nodes:
            said = [vf.SystemMessage(content=task.data.system_prompt), *said]
        told = [{"role": one.role, "content": content_text(one.content)} for one in said]
        self.environment.asked.put_nowait(told)
        reply = vf.AssistantMessage(content=await self.environment.answers.get())
        for one in [*said, reply]:
            parent = len(trace.nodes) - 1 if trace.nodes else None
            trace.nodes.append(vf.MessageNode(parent=parent, message=one, sampled=one is reply))
        return vf.Segment(messages=[reply])


def check_environment(env: Any, task: Any) -> tuple[str, Any]:
    """Returns the agent's name and config; ValueError for what needs more than a policy that speaks."""
    from verifiers.v1.configs.agent import agent_config_fields

    agents = agent_config_fields(env.config)
    runtimes = {
        hook.__name__: inspect.signature(hook).parameters.get("runtime")
        for hook in task.hooks("reward")
    }
    tools = [*type(task).toolsets(task.config), *type(env.taskset).toolsets(env.taskset.config)]
    needs = {
        "agents besides the policy, which need a model": list(agents) if len(agents) > 1 else [],
        "judges, which need a model": [judge.reward_name for judge in task.plugged_judges()],
        "rewards that need a runtime": [
            hook for hook, p in runtimes.items() if p and p.default is p.empty
        ],
        "tool servers": [type(tool).__name__ for tool in tools],
        "a container": [type(task).__name__] if task.NEEDS_CONTAINER else [],
    }
    for need, names in needs.items():
        if names:
            raise ValueError(
                f"it has {need}: {', '.join(names)}; allowed: one agent that only speaks"
            )
    return next(iter(agents.items()))


def _row(task: Any) -> Any:
    """Describes a task as the library's records do."""
    import verifiers.v1 as vf

    return vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
