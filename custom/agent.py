"""Agents: one environment and one conversation, as the turn loop drives them.

Invariant: whatever class of a user's stands behind it, an agent that `AgentSpec.build` made gives well-formed messages
and finite rewards, or raises. A conversation, with `get_prompt_prefix` and a state description:

    reset(seed)     -> [system: prefix, user: observation + state]
    step("guess 5") -> [user: observation + state], reward, done, info        # what follows the policy's own message

A trial plays a few episodes before a run trains on them: what does a game pay for random and for useless answers? A
policy learns whatever pays best, and where answers that nobody can read, or ending early, pay more than play does, it
learns that. Nothing that an agent does in a trial is raised, but for what ends its home.
"""

import copy
import inspect
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from custom import env
from custom.adapters.base import make_environment
from custom.env import MAX_OBSERVATION_CHARS, Message, Observation, Task, Trajectory
from custom.tools import ActionParser, MultiTurnManager, Tool, ToolRegistry, get_parser, load_tools
from data.loading import load_extern_object

RewardFn = Callable[..., float]


@dataclass(eq=False)
class Agent:
    """Plays one environment, with tools if there are any; subclass it, or replace it, by `agent.cls`.

    Args:
        environment: any object with `reset` and `step`; BaseEnvironment has the rest.
        tools, parser: calls that the parser finds in a response are executed, all other text goes to the environment.
        include_state: add `get_state_description()` where its class overrides it and the observation lacks it.
        max_observation_chars: longer observations are cut in the middle.
        reward_fn: `reward_fn(trajectory, environment)` or `reward_fn(trajectory)`: replaces the environment's rewards.
        system_prompt: in place of the environment's `get_prompt_prefix()`.
        initial_prompt: comes before the first observation.
    """

    environment: Any
    _: KW_ONLY
    tools: ToolRegistry | None = None
    parser: Any = None
    include_state: bool = True
    max_observation_chars: int = MAX_OBSERVATION_CHARS
    reward_fn: RewardFn | None = None
    system_prompt: str = ""
    initial_prompt: str = ""
    trajectory: Trajectory = field(default_factory=Trajectory, init=False)
    manager: MultiTurnManager | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.tools is not None:
            self.manager = MultiTurnManager(
                self.tools, self.parser, self.environment, self.max_observation_chars
            )

    @property
    def tool_schemas(self) -> list[dict[str, Any]] | None:
        """Returns the tools as function schemas, for the chat template's `tools=`."""
        return None if self.tools is None else self.tools.schemas()

    def reset(self, seed: int, task: Task | None = None) -> list[Message]:
        """Starts an episode and returns the system message, if there is one, and the first user message."""
        self.trajectory = Trajectory(seed=seed)
        if self.manager is not None:
            self.manager.turns.clear()
        first = env.reset_environment(self.environment, seed, self.max_observation_chars, task)
        observation = self._with_state(_behind(self.initial_prompt, first))
        prefix = self.system_prompt or _text_of(self.environment, "get_prompt_prefix")
        self.trajectory.states.append(observation)
        messages = as_user_messages(observation)
        has_system = any(message["role"] == "system" for message in messages)
        return (
            messages
            if has_system or not prefix
            else [{"role": "system", "content": prefix}, *messages]
        )

    def step(self, response_text: str) -> env.StepResult:
        """Plays a response and returns (messages to append, reward, done, info).

        With a reward_fn the reward is 0, and `info["environment_reward"]` has the environment's. With tools,
        `info["tool_calls"]` lists the calls as {"name", "ok", "error_kind", "seconds"}.
        """
        result = self._play(response_text)
        self.trajectory.record(response_text, result)
        own = {} if self.reward_fn is None else {"environment_reward": result.reward}
        messages, reward = as_user_messages(result.observation), 0.0 if own else result.reward
        return env.StepResult(messages, reward, result.done, result.info | own)

    def episode_reward(self, ending: str) -> float | None:
        """Returns the reward_fn's value for the episode that ended so; None where there is no reward_fn."""
        self.trajectory.ending = ending
        return (
            None
            if self.reward_fn is None
            else reward_of(self.reward_fn, self.trajectory, self.environment)
        )

    def close(self) -> None:
        """Closes the environment, where it can be closed."""
        env.call_method(self.environment, "close")

    def _play(self, response_text: str) -> env.StepResult:
        if self.manager is None:
            result = env.step_environment(
                self.environment, response_text, self.max_observation_chars
            )
            return result._replace(observation=self._with_state(result.observation))
        turn = self.manager.step(response_text)
        calls = [record.facts() for record in turn.calls]
        observation = turn.observation if calls else self._with_state(turn.observation)
        reward = env.check_reward(turn.reward, "a tool")
        return env.StepResult(observation, reward, turn.done, {**turn.info, "tool_calls": calls})

    def _with_state(self, observation: Observation) -> Observation:
        """Appends the state to the last message, unless one of them holds it."""
        state = _text_of(self.environment, "get_state_description") if self.include_state else ""
        messages = as_user_messages(observation)
        if not messages or not state or any(state in message["content"] for message in messages):
            return observation
        text = messages[-1]["content"]
        messages[-1] = {**messages[-1], "content": f"{text}\n{state}" if text else state}
        joined = messages[0]["content"] if isinstance(observation, str) else messages
        return env.check_observation(joined, "get_state_description", self.max_observation_chars)


def _behind(text: str, observation: Observation) -> Observation:
    """Returns the observation with a text before it."""
    if not text:
        return observation
    if isinstance(observation, str):
        return f"{text}\n\n{observation}" if observation else text
    return [{"role": "user", "content": text}, *observation]


def as_user_messages(observation: Observation) -> list[Message]:
    """Makes one user message of a text; messages stay as they are."""
    return (
        [{"role": "user", "content": observation}]
        if isinstance(observation, str)
        else list(observation)
    )


class CheckedAgent(Agent):
    """Checks a user's agent of any class: it needs `reset` and `step`; `close` and the rest are optional.

    Its `step` may return text instead of messages, and what else an environment's may.
    What it returns is recorded as the trajectory that the reward_fn sees.
    """

    def __init__(self, inner: Any, reward_fn: RewardFn | None, max_observation_chars: int) -> None:
        environment = getattr(inner, "environment", None)
        super().__init__(
            environment, reward_fn=reward_fn, max_observation_chars=max_observation_chars
        )
        self.inner = inner

    @property
    def tool_schemas(self) -> list[dict[str, Any]] | None:
        """Returns the agent's own, if it has any."""
        return getattr(self.inner, "tool_schemas", None)

    def reset(self, seed: int, task: Task | None = None) -> list[Message]:
        """Starts an episode and returns the agent's first messages."""
        self.trajectory = Trajectory(seed=seed)
        where = env.located(self.inner.reset, f"{type(self.inner).__name__}.reset")
        given = {"task": task} if env.takes_keyword(self.inner.reset, "task") else {}
        if task and not given:
            raise env.BadEnvironment(f"{where} takes no task=, which the dataset's rows are")
        first = env.check_observation(
            self.inner.reset(seed, **given), where, self.max_observation_chars
        )
        messages = as_user_messages(first)
        if not messages:
            raise env.BadEnvironment(f"{where} returned no message; allowed: one or more")
        self.trajectory.states.append(_as_observation(messages))
        return messages

    def _play(self, response_text: str) -> env.StepResult:
        result = env.step_environment(self.inner, response_text, self.max_observation_chars)
        return result._replace(observation=_as_observation(result.observation))

    def episode_reward(self, ending: str) -> float | None:
        """Returns the reward_fn's value, else the agent's own, where it has one."""
        value = env.call_method(self.inner, "episode_reward", ending)
        if self.reward_fn is None and value is not None:
            return env.check_reward(value, f"{type(self.inner).__name__}.episode_reward")
        return super().episode_reward(ending)

    def close(self) -> None:
        """Closes the agent, else its environment."""
        env.call_method(self.inner if hasattr(self.inner, "close") else self.environment, "close")


@dataclass(frozen=True)
class AgentSpec:
    """Says how an agent is built, wherever it then lives; it pickles if the objects in it do.

    `environment` is a name or class that `make_environment` knows, with its `kwargs`; a function that returns an
    environment; or an environment itself, which every agent gets a copy of. With an agent class of your own
    (`agent_path`, `agent_name`) it may be None: the class is then built without one. `reward_fn` and `agent_cls` are
    for objects that do not come from a file; `prompt_template` is an adapter's; `max_turn` and `max_turn_tokens` are
    limits of its own. Each agent gets a copy of a tool that is given as an object.
    """

    environment: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    agent_path: str | None = None
    agent_name: str = "Agent"
    tools: tuple[str | Tool, ...] = ()
    parser: str | ActionParser = "function"
    include_state: bool = True
    system_prompt: str = ""
    prompt_template: str | None = None
    max_observation_chars: int = MAX_OBSERVATION_CHARS
    reward_path: str | None = None
    reward_name: str = "reward_fn"
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reward_fn: RewardFn | None = None
    agent_cls: Callable[..., Any] | None = None
    max_turn: int | None = None
    max_turn_tokens: int | None = None

    @property
    def source(self) -> Any:
        """Returns what messages and metrics are named after: the environment, or the agent that brings its own."""
        return self.agent_cls or self.agent_name if self.environment is None else self.environment

    def build(self) -> Agent:
        """Makes a new agent with an environment of its own."""
        environment, reward_fn, limit = (
            self._make_environment(),
            self._reward_fn(),
            self.max_observation_chars,
        )
        plain = ("include_state", "max_observation_chars", "system_prompt")
        settings = {name: getattr(self, name) for name in plain}
        if self.tools:
            parser = get_parser(self.parser) if isinstance(self.parser, str) else self.parser
            settings |= {"tools": load_tools(self.tools), "parser": parser}
        make = (
            self.agent_cls
            if self.agent_path is None
            else load_extern_object(self.agent_path, self.agent_name)
        )
        if make is None or make is Agent:
            return Agent(environment, reward_fn=reward_fn, **settings)
        accepted = {
            name: value for name, value in settings.items() if env.takes_keyword(make, name)
        }
        return CheckedAgent(
            make(*([] if environment is None else [environment]), **accepted), reward_fn, limit
        )

    def _make_environment(self) -> Any:
        source = self.environment
        if source is None and (self.agent_path or self.agent_cls):
            return None
        if not isinstance(source, type) and callable(getattr(source, "step", None)):
            return copy_environment(source)
        template = {} if self.prompt_template is None else {"prompt_template": self.prompt_template}
        return make_environment(source, {**self.kwargs, **template})

    def _reward_fn(self) -> RewardFn | None:
        path = self.reward_path
        function = self.reward_fn if path is None else load_extern_object(path, self.reward_name)
        return (
            partial(function, **self.reward_kwargs) if function and self.reward_kwargs else function
        )


def copy_environment(environment: Any) -> Any:
    """Makes a deep copy; where that fails, a new one of the same class and config; else give a function instead."""
    # An object may refuse in any way it likes.
    with suppress(Exception):
        return copy.deepcopy(environment)
    return type(environment)(environment.config)


def reward_of(reward_fn: RewardFn, trajectory: Trajectory, environment: Any) -> float:
    """Returns the checked reward of a trajectory.

    The function gets the environment too where it has a second argument without a default, or one that is named so.
    """
    parameters = inspect.signature(reward_fn).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    wanted = any(p.default is p.empty or p.name in ("environment", "env") for p in positional[1:2])
    both = wanted or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return env.check_reward(
        reward_fn(*(trajectory, environment)[: 1 + both]), env.located(reward_fn, "reward_fn")
    )


def _as_observation(observation: Observation) -> Observation:
    """Returns a single user message as its text."""
    match observation:
        case [{"role": "user", "content": text, **others}] if not others:
            return text
    return observation


def _text_of(environment: Any, method: str) -> str:
    text = env.call_method(environment, method) if hasattr(environment, method) else ""
    if not isinstance(text, str):
        raise env.BadEnvironment(
            f"{type(environment).__name__}.{method} returned {env.shown(text)}; allowed: a string"
        )
    return text


# Seconds after which no further episode begins, and a running one is dropped.
LONGEST_S = 10.0
GARBAGE = ("zzz", "I would rather not say.", "?!", "", "The the the the the.")
# Each plays: with random answers, with useless ones, with a random one and then useless ones, and with a random one
# behind which there is no room for more. All but garbage begin with the same answer.
PLAYERS = ("random", "garbage", "quitting", "cut")


@dataclass
class Played:
    """Holds one episode: its reward and turns, the error that ended it, what it began with and was first told."""

    reward: float = 0.0
    turns: int = 0
    error: str = ""
    first: list[Message] = field(default_factory=list)
    told: list[Message] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """Holds what one player got: means over its episodes that did not crash, and of the others the first error."""

    reward: float
    turns: float
    episodes: int
    crashes: int
    error: str


@dataclass(frozen=True)
class Trial:
    """Holds what came of a trial.

    Attributes:
        outcomes: by player; those for whom there was no time are left out.
        max_turns: the most turns that the game lasts by its own rules; None: unknown.
        differs: under one seed it began differently, or was told another thing after the same answer.
    """

    outcomes: dict[str, Outcome]
    max_turns: int | None
    differs: bool


def play_trial(
    agent: Any, seed: int, episodes: int, max_turn: int, task: Task | None = None
) -> Trial:
    """Has every player play `episodes` episodes of at most `max_turn` turns, the same tasks for each."""
    end, rounds = time.monotonic() + LONGEST_S, list[dict[str, Played | None]]()
    differs = False
    # In turn, so that each has played where time runs out.
    for number in range(episodes):
        rounds.append(
            {player: _play(agent, player, seed + number, task, max_turn, end) for player in PLAYERS}
        )
        clean = {
            player: result for player, result in rounds[-1].items() if result and not result.error
        }
        begins = [result.first for result in clean.values()]
        answers = [result.told for player, result in clean.items() if player != "garbage"]
        differs |= any(one != begins[0] for one in begins) or any(
            one != answers[0] for one in answers
        )
    results = {
        player: [result for played in rounds if (result := played[player])] for player in PLAYERS
    }
    outcomes = {player: _outcome(played) for player, played in results.items() if played}
    most = getattr(agent.environment, "max_turns", None)
    return Trial(outcomes, most if isinstance(most, int) else None, differs)


def _play(
    agent: Any, player: str, seed: int, task: Task | None, max_turn: int, end: float
) -> Played | None:
    """Plays an episode; None where time runs out."""
    # Of no generator that the environment may have made of the seed.
    generator, played = random.Random(f"trial {seed}"), Played()
    try:
        messages, done = agent.reset(seed, task), False
        played.first = list(messages)
        while not done and played.turns < (1 if player == "cut" else max_turn):
            if time.monotonic() > end:
                return None
            answer = _answer(player, played.turns, agent.environment, generator, messages)
            messages, reward, done, _ = agent.step(answer)
            played.reward, played.turns = played.reward + reward, played.turns + 1
            played.told = played.told or list(messages)
        own = agent.episode_reward(
            "done" if done else "overflow" if player == "cut" else "max_turns"
        )
        played.reward = played.reward if own is None else own
    # Whatever a user's code raises is what the trial is to find out.
    except BaseException as problem:
        if isinstance(problem, env.Abandoned | KeyboardInterrupt):
            raise
        played.error = env.describe(problem)
    return played


def _answer(
    player: str, turns: int, environment: Any, generator: random.Random, said: list[Message]
) -> str:
    """Returns what the player says: a readable action where the environment has one, else a word of what was said."""
    if player == "garbage" or (player == "quitting" and turns > 0):
        return generator.choice(GARBAGE)
    own = env.call_method(environment, "sample_action", generator)
    words = re.findall(r"\w+", said[-1]["content"]) if said and own is None else []
    return generator.choice(words or ["hello"]) if own is None else str(own)


def _outcome(played: Sequence[Played]) -> Outcome:
    errors = [result.error for result in played if result.error]
    clean = [(result.reward, result.turns) for result in played if not result.error]
    reward, turns = np.mean(clean or [(0.0, 0)], axis=0).tolist()
    return Outcome(reward, turns, len(played), len(errors), errors[0] if errors else "")
