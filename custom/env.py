"""Environments: what a user writes.

An environment is a game of text: `reset` gives the first observation, `step` answers an action, and
the framework calls both through custom/env_calls.py, which checks what they return. Invariant:
nothing here knows tokens, models or agents, and nothing here runs an environment.

The smallest examples to copy are in custom/envs/.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeAlias

# {"role": one of ROLES, "content": text}, perhaps with "name" and "tool_call_id".
Message: TypeAlias = dict[str, str]
ROLES = ("system", "user", "assistant", "tool")
# `reset` and `step` show this to the policy: a text, or chat messages.
Observation: TypeAlias = str | list[Message]
# `reset` may be given this beside the seed: a row of a dataset, by column.
Task: TypeAlias = Mapping[str, Any]


class BadEnvironment(ValueError):
    """Raised where what an environment, an agent or a reward function returned cannot be used."""


class BadRewardFunction(BadEnvironment):
    """Raised where a reward function raised, or returned what is no reward.

    It says nothing of the episode: to play that again would choose those for which the function
    works, so it ends the run.
    """


class BadContext(ValueError):
    """Raised where a function of the user's that says what a model reads cannot be used.

    It raised, or returned what is no conversation. It ends the run, with its sentence alone.
    """


class RewardFunctionRaised(BadRewardFunction, RuntimeError):
    """Raised where a function that scores rows raised: its sentence has the file, line and row."""


@dataclass
class EnvironmentConfig:
    """Holds an environment's parameters.

    Subclass it with fields of your own, and name the subclass as `config_cls` of the environment.
    """


class BaseEnvironment(ABC):
    """Plays a game of text: write `reset` and `step`; the rest is optional.

    Each method may be an `async def`; see custom/coroutines.py.

        class Coin(BaseEnvironment):
            def reset(self, seed=None):
                self.side = random.Random(seed).choice(["heads", "tails"])
                return "I threw a coin. Heads or tails?"

            def step(self, action):  # (observation, reward, done, info), or gymnasium's five
                return f"It was {self.side}.", float(self.side in action.lower()), True, {}

    `config` is an instance of `config_cls`, by default with its default values.
    """

    config_cls: ClassVar[type[EnvironmentConfig]] = EnvironmentConfig
    # The most turns that an episode can last by the game's own rules; None: unknown.
    max_turns: int | None = None
    _done: bool = False

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        # A bare EnvironmentConfig holds nothing: it stands for the defaults of any environment.
        if config is None or type(config) is EnvironmentConfig:
            config = self.config_cls()
        self.config: Any = config

    @abstractmethod
    def reset(self, seed: int | None = None) -> Any:
        """Starts an episode and returns the first observation; equal seeds give equal episodes.

        It may leave `seed` out of its signature, and may return gymnasium's (observation, info).
        """

    @abstractmethod
    def step(self, action: str) -> "tuple[Any, ...] | StepReply":
        """Plays an action; returns (observation, reward, done, info), or gymnasium's five values.

        Those are (observation, reward, terminated, truncated, info). A StepReply may replace the
        conversation so far.
        """

    def get_state_description(self) -> str:
        """Returns context that is added to each observation which does not already contain it."""
        return ""

    def get_prompt_prefix(self) -> str:
        """Returns the system prompt; empty: none."""
        return ""

    def sample_action(self, generator: random.Random) -> str | None:
        """Returns a readable action drawn at random, for the trial at a run's start.

        None where the environment knows of none.
        """
        return None

    def close(self) -> None:
        """Frees what the environment holds; called once, also after an episode that failed."""
        self._done = True


class NewHistory(list[Message]):
    """Marks the messages of an observation that take the place of the whole conversation so far."""


@dataclass(frozen=True, kw_only=True)
class StepReply:
    """Holds what a step may return in place of its four values, and says more.

        return StepReply(messages=[{"role": "user", "content": "You are in the cellar. …"}])

    Attributes:
        messages: the whole conversation from here on, the policy's earlier turns and the task
            included where it is to read them; None: it goes on with the observation.
        observation: what the policy reads next, where there are no messages.
        reward, done, info: as of a step.
    """

    messages: list[Message] | None = None
    observation: Observation = ""
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)

    def as_values(self) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Returns the four values of a step."""
        observation = self.observation if self.messages is None else NewHistory(self.messages)
        return observation, self.reward, self.done, self.info


class StepResult(NamedTuple):
    """Holds the four values of a step, checked.

    An agent's step returns the same, with messages as the observation.
    """

    observation: Observation
    reward: float
    done: bool
    info: dict[str, Any]


@dataclass
class Trajectory:
    """Holds one episode, as a `reward_fn` reads it.

    `states[t]` is what the policy saw before `actions[t]`; a last state follows the last action:

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
        """Returns the number of turns so far."""
        return len(self.actions)

    def record(self, action: str, step: StepResult) -> None:
        """Adds an action and what came of it."""
        self.actions.append(action)
        self.states.append(step.observation)
        self.rewards.append(step.reward)
        self.dones.append(step.done)
        self.infos.append(step.info)
