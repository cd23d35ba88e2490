"""Agents: one environment and one conversation, as the turn loop drives them.

Invariant: whatever class of a user's stands behind it, an agent that `AgentSpec.build` made gives
well-formed messages and finite rewards, or raises. A conversation, with `get_prompt_prefix` and a
state description:

    reset(seed)     -> [system: prefix, user: observation + state]
    step("guess 5") -> [user: observation + state], reward, done, info
                       # the messages that follow the policy's own
"""

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import partial
from typing import Any, ClassVar

from custom.coroutines import finished
from custom.env import (
    BadEnvironment,
    BadRewardFunction,
    Message,
    NewHistory,
    Observation,
    StepResult,
    Task,
    Trajectory,
)
from custom.env_calls import (
    MAX_OBSERVATION_CHARS,
    Abandoned,
    begin_environment,
    call_method,
    check_observation,
    check_reward,
    located,
    parameters_of,
    raised,
    shown,
    split_info,
    step_environment,
    takes_keyword,
)
from custom.env_factory import library_of, make_environment
from custom.envs.dataset_row import DatasetRowEnvironment
from custom.model_errors import ModelError
from custom.side_services import SideService, set_up_services
from custom.tools import (
    ActionParser,
    FamilyParser,
    MultiTurnManager,
    Tool,
    ToolRegistry,
    ToolSource,
    get_parser,
    load_tools,
    said_in,
)
from data.loading import load_extern_object
from data.own_names import keep_own

RewardFn = Callable[..., float]


@dataclass(eq=False)
class Agent:
    """Plays one environment, with tools if there are any.

    To change what it does subclass it, or write a class of your own, and name that as `agent.cls`.

    Args:
        environment: any object with `reset` and `step`; BaseEnvironment has the rest.
        tools, parser: calls that the parser finds in a response are executed, all other text goes
            to the environment.
        include_state: add `get_state_description()` where the environment has one and the
            observation lacks it.
        max_observation_chars: longer observations are cut in the middle.
        reward_fn: `reward_fn(trajectory, environment)` or `reward_fn(trajectory)`: replaces the
            environment's rewards.
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
    # What the last reset said beside its observation.
    reset_info: Mapping[str, Any] = field(default_factory=dict, init=False)
    manager: MultiTurnManager | None = field(default=None, init=False)
    # Tools that were made for this agent alone, and end with it.
    own_tools: ToolRegistry | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.tools is not None:
            self.manager = MultiTurnManager(
                self.tools, self.parser, self.environment, self.max_observation_chars
            )

    @property
    def tool_schemas(self) -> list[dict[str, Any]] | None:
        """Returns the tools as function schemas, for the chat template's `tools=`."""
        if self.tools is None:
            return None
        return self.tools.schemas()

    def reset(self, seed: int, task: Task | None = None) -> list[Message]:
        """Starts an episode; returns the system message, if any, and the first user message."""
        self.trajectory = Trajectory(seed=seed)
        if self.manager is not None:
            self.manager.begin_episode(task)
        # A dataset's prompt is no observation: its length is for data.max_prompt_length to bound.
        whole = isinstance(self.environment, DatasetRowEnvironment)
        max_chars = sys.maxsize if whole else self.max_observation_chars
        first, self.reset_info = begin_environment(self.environment, seed, max_chars, task)
        observation = self._with_state(_with_text_before(first, self.initial_prompt))
        prefix = self.system_prompt or _text_of(self.environment, "get_prompt_prefix")
        self.trajectory.states.append(observation)
        messages = as_user_messages(observation)
        has_system_message = any(message["role"] == "system" for message in messages)
        if prefix and not has_system_message:
            messages.insert(0, {"role": "system", "content": prefix})
        return messages

    def step(self, response_text: str) -> StepResult:
        """Plays a response and returns (messages to append, reward, done, info).

        With a reward_fn the reward is 0, and `info["environment_reward"]` has the environment's.
        With tools, `info["tool_calls"]` lists the calls as {"name", "ok", "error_kind", "seconds"}.
        """
        result = self._play(response_text)
        self.trajectory.record(response_text, result)
        reward = result.reward
        info = dict(result.info)
        if self.reward_fn is not None:
            info = keep_own(info, ("environment_reward",), "an environment's info")
            info["environment_reward"] = reward
            reward = 0.0
        return StepResult(as_user_messages(result.observation), reward, result.done, info)

    def episode_reward(self, ending: str) -> float | None:
        """Returns the reward_fn's value for the episode that ended so; None without a reward_fn."""
        self.trajectory.ending = ending
        if self.reward_fn is None:
            return None
        return reward_of(self.reward_fn, self.trajectory, self.environment)

    def close(self) -> None:
        """Closes the environment, where it can be closed, and tools made for this agent."""
        try:
            call_method(self.environment, "close")
        finally:
            self._close_tools()

    def _close_tools(self) -> None:
        if self.own_tools is not None:
            self.own_tools.close()

    def _play(self, response_text: str) -> StepResult:
        """Hands a response to the tools that it calls, else to the environment."""
        if self.manager is None:
            said = said_in(response_text, self.parser)
            result = step_environment(self.environment, said, self.max_observation_chars)
            return result._replace(observation=self._with_state(result.observation))
        turn = self.manager.step(response_text)
        observation = turn.observation
        if not turn.calls:
            observation = self._with_state(observation)
        info = keep_own(turn.info, ("tool_calls",), "an environment's info")
        info["tool_calls"] = [record.as_info() for record in turn.calls]
        return StepResult(observation, check_reward(turn.reward, "a tool"), turn.done, info)

    def _with_state(self, observation: Observation) -> Observation:
        """Appends the state's description to the last message, unless one of them contains it."""
        if not self.include_state:
            return observation
        state = _text_of(self.environment, "get_state_description")
        messages = as_user_messages(observation)
        if not messages or not state or any(state in message["content"] for message in messages):
            return observation
        text = messages[-1]["content"]
        text_and_state = f"{text}\n{state}" if text else state
        messages[-1] = {**messages[-1], "content": text_and_state}
        joined: Observation = messages
        if isinstance(observation, str):
            joined = text_and_state
        return check_observation(joined, "get_state_description", self.max_observation_chars)


class CheckedAgent(Agent):
    """Checks a user's agent of any class: it needs `reset` and `step`; the rest is optional.

    Its `step` may return text instead of messages, and what else an environment's may. Its
    values are recorded as the trajectory that the reward_fn sees.
    """

    def __init__(self, inner: Any, reward_fn: RewardFn | None, max_observation_chars: int) -> None:
        super().__init__(
            getattr(inner, "environment", None),
            reward_fn=reward_fn,
            max_observation_chars=max_observation_chars,
        )
        self.inner = inner

    @property
    def tool_schemas(self) -> list[dict[str, Any]] | None:
        """Returns the agent's own, if it has any."""
        return getattr(self.inner, "tool_schemas", None)

    def reset(self, seed: int, task: Task | None = None) -> list[Message]:
        """Starts an episode and returns the agent's first messages."""
        self.trajectory = Trajectory(seed=seed)
        where = located(self.inner.reset, f"{type(self.inner).__name__}.reset")
        if takes_keyword(self.inner.reset, "task"):
            answer = finished(self.inner.reset(seed, task=task))
        elif task:
            raise BadEnvironment(f"{where} takes no task=, which the dataset's rows are")
        else:
            answer = finished(self.inner.reset(seed))
        answer, self.reset_info = split_info(answer)
        observation = check_observation(answer, where, self.max_observation_chars)
        messages = as_user_messages(observation)
        if not messages:
            raise BadEnvironment(f"{where} returned no message; allowed: one or more")
        self.trajectory.states.append(_as_text(messages))
        return messages

    def _play(self, response_text: str) -> StepResult:
        result = step_environment(self.inner, response_text, self.max_observation_chars)
        return result._replace(observation=_as_text(result.observation))

    def episode_reward(self, ending: str) -> float | None:
        """Returns the reward_fn's value, else the agent's own, where it has one."""
        value = call_method(self.inner, "episode_reward", ending)
        if self.reward_fn is None and value is not None:
            return check_reward(value, f"{type(self.inner).__name__}.episode_reward")
        return super().episode_reward(ending)

    def close(self) -> None:
        """Closes the agent, else its environment, and tools made for this agent."""
        try:
            if hasattr(self.inner, "close"):
                call_method(self.inner, "close")
            else:
                call_method(self.environment, "close")
        finally:
            self._close_tools()


@dataclass(frozen=True)
class AgentSpec:
    """Describes how an agent is built, wherever it then lives; it pickles if the objects in it do.

    Attributes:
        environment: a name or class that `make_environment` knows; a function that returns an
            environment; or an environment itself, which every agent gets a copy of. None where an
            agent class of your own is built without one.
        kwargs: what the environment's name, class or function is given.
        agent_path, agent_name: the file and name of an agent class of your own.
        agent_cls: such a class that does not come from a file.
        tools: their names; or objects, of which each agent gets a copy; or further sources of them.
        mcp_servers: sources of tools, under their older name: they are added to `tools`.
        parser: reads the tools' calls, by name or as an object.
        include_state, system_prompt, max_observation_chars: see Agent.
        prompt_template: an adapter's.
        reward_path, reward_name, reward_kwargs: the file, name and further arguments of a
            reward_fn.
        reward_fn: one that does not come from a file.
        max_turn, max_turn_tokens: limits of its own, in place of the config's.
        services: beside the policy, which are set up wherever the agent lives.
    """

    environment: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    agent_path: str | None = None
    agent_name: str = "Agent"
    tools: tuple[str | Tool | ToolSource, ...] = ()
    mcp_servers: InitVar[tuple[ToolSource, ...]] = ()
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
    services: tuple[SideService, ...] = ()

    # Who plays its episodes; see workers/rollout/kinds.py.
    kind: ClassVar[str] = "workers.rollout.environment_kind:ENVIRONMENT"

    def __post_init__(self, mcp_servers: tuple[ToolSource, ...]) -> None:
        if mcp_servers:
            object.__setattr__(self, "tools", (*self.tools, *mcp_servers))

    @property
    def source(self) -> Any:
        """Returns what messages and metrics are named after.

        That is the environment, or the agent that brings its own.
        """
        if self.environment is not None:
            return self.environment
        return self.agent_cls or self.agent_name

    @property
    def libraries(self) -> tuple[str, ...]:
        """Returns what a process that is to build it may import ahead: an environment's library."""
        library = library_of(self.environment)
        return () if library is None else (library,)

    def build(self) -> Agent:
        """Makes a new agent with an environment of its own."""
        set_up_services(self.services)
        environment = self._make_environment()
        reward_fn = self._load_reward_fn()
        arguments = self._agent_arguments()
        try:
            agent = self._make_agent(environment, reward_fn, arguments)
        except BaseException:
            if "tools" in arguments:
                arguments["tools"].close()
            raise
        agent.own_tools = arguments.get("tools")
        if agent.own_tools is not None:
            # An agent class of the user's may call its tools by hand.
            agent.own_tools.bind(agent.environment)
        return agent

    def _make_agent(
        self, environment: Any, reward_fn: RewardFn | None, arguments: dict[str, Any]
    ) -> Agent:
        """Makes the agent of these parts."""
        make_agent = self.agent_cls
        if self.agent_path is not None:
            make_agent = load_extern_object(self.agent_path, self.agent_name)
        if make_agent is None or make_agent is Agent:
            return Agent(environment, reward_fn=reward_fn, **arguments)
        # A class of the user's may take fewer arguments, and its reward_fn is called out here.
        accepted = {
            name: value for name, value in arguments.items() if takes_keyword(make_agent, name)
        }
        if environment is None:
            agent = make_agent(**accepted)
        else:
            agent = make_agent(environment, **accepted)
        return CheckedAgent(agent, reward_fn, self.max_observation_chars)

    def _make_environment(self) -> Any:
        brings_its_own = self.agent_path is not None or self.agent_cls is not None
        if self.environment is None and brings_its_own:
            return None
        is_class = isinstance(self.environment, type)
        if not is_class and callable(getattr(self.environment, "step", None)):
            return copy_environment(self.environment)
        kwargs = dict(self.kwargs)
        if self.prompt_template is not None:
            kwargs["prompt_template"] = self.prompt_template
        return make_environment(self.environment, kwargs)

    def _agent_arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "include_state": self.include_state,
            "max_observation_chars": self.max_observation_chars,
            "system_prompt": self.system_prompt,
        }
        if self.tools:
            arguments["tools"] = load_tools(self.tools)
            arguments["parser"] = self.parser
            if isinstance(self.parser, str):
                arguments["parser"] = get_parser(self.parser)
        elif isinstance(self.parser, FamilyParser):
            arguments["parser"] = self.parser
        return arguments

    def _load_reward_fn(self) -> RewardFn | None:
        reward_fn = self.reward_fn
        if self.reward_path is not None:
            reward_fn = load_extern_object(self.reward_path, self.reward_name)
        if reward_fn is not None and self.reward_kwargs:
            reward_fn = partial(reward_fn, **self.reward_kwargs)
        if reward_fn is not None:
            require_trajectory_function(reward_fn)
        return reward_fn


def copy_environment(environment: Any) -> Any:
    """Makes a deep copy; where that fails, a new environment of the same class and config.

    Where that fails, too, give the AgentSpec a function instead.
    """
    # An object may refuse to be copied in any way it likes.
    with suppress(Exception):
        return copy.deepcopy(environment)
    return type(environment)(environment.config)


def reward_of(reward_fn: RewardFn, trajectory: Trajectory, environment: Any) -> float:
    """Returns the checked reward of a trajectory.

    The function gets the environment too where it has a second argument without a default, or one
    that is named so. An exception, or a value that is no reward, is a BadRewardFunction; but a
    model that did not answer it (ModelError) is a failure of the episode.
    """
    where = located(reward_fn, "reward_fn")
    arguments = [trajectory]
    if _takes_environment(reward_fn):
        arguments.append(environment)
    try:
        return check_reward(finished(reward_fn(*arguments)), where)
    except (Abandoned, KeyboardInterrupt, ModelError):
        raise
    except BadEnvironment as error:
        raise BadRewardFunction(str(error)) from None
    # Whatever else a user's function raises.
    except BaseException as error:
        raise BadRewardFunction(f"{where} raised {raised(error, reward_fn)}") from error


def require_trajectory_function(reward_fn: RewardFn) -> None:
    """Raises BadRewardFunction where a function cannot be called as `reward_of` calls it."""
    signature = parameters_of(reward_fn)
    arguments = [None, None] if _takes_environment(reward_fn) else [None]
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise BadRewardFunction(
            f"{located(reward_fn, 'reward_fn')} takes {signature}; it is called as "
            f"reward_fn(trajectory) or reward_fn(trajectory, environment): {error}"
        ) from None


def _takes_environment(reward_fn: RewardFn) -> bool:
    positional = []
    for parameter in inspect.signature(reward_fn).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            return True
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            positional.append(parameter)
    if len(positional) < 2:
        return False
    second = positional[1]
    return second.default is second.empty or second.name in ("environment", "env")


def as_user_messages(observation: Observation) -> list[Message]:
    """Returns a new list: a text as one user message, messages as they are.

    Those of a new history stay one.
    """
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if isinstance(observation, NewHistory):
        return NewHistory(observation)
    return list(observation)


def _as_text(observation: Observation) -> Observation:
    """Returns a single user message as its text; all else stays as it is."""
    if isinstance(observation, NewHistory):
        return observation
    match observation:
        case [{"role": "user", "content": text, **others}] if not others:
            return text
    return observation


def _with_text_before(observation: Observation, text: str) -> Observation:
    if not text:
        return observation
    if isinstance(observation, str):
        return f"{text}\n\n{observation}" if observation else text
    return [{"role": "user", "content": text}, *observation]


def _text_of(environment: Any, method: str) -> str:
    """Returns the text of a method that an environment may leave out; empty without it."""
    text = call_method(environment, method) if hasattr(environment, method) else ""
    if not isinstance(text, str):
        raise BadEnvironment(
            f"{type(environment).__name__}.{method} returned {shown(text)}; allowed: a string"
        )
    return text
