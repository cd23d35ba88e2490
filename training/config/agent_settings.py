"""Holds the settings of agents and of the environments that they act in, as settings.py holds the others."""

from dataclasses import field
from typing import Any, Literal, NamedTuple

from training.config import section as of


class EnvironmentChoice(of.Section):
    """What the agent acts in. Give `name`, or `path` and `cls`."""

    #: gymnasium:ID, reasoning_gym:NAME, textarena:ID, textworld:NAME, verifiers:NAME or PACKAGE.MODULE:CLASS
    name: str | None = None
    path: of.InputPath | None = None  #: Python file with a class of your own
    cls: str | None = None  #: name of the class in that file
    kwargs: dict[str, Any] = field(default_factory=dict)  #: its settings
    #: where it runs; null = process for libraries that run texts, else thread
    isolation: Literal["thread", "process", "ray"] | None = None
    num_workers: of.PositiveInt | None = None  #: calls (threads) or environments at once; null = no limit
    network: bool | None = None  #: of its process; null = none where a library runs texts
    memory_gb: of.PositiveFloat | None = None  #: GiB that its process may take; null = 4 where a library runs texts
    prompt_template: str | None = None  #: how an adapter words its observations; null = its own
    weight: of.PositiveFloat = 1.0  #: in env_template: its share of the episodes, relative to the others'
    max_turn: of.PositiveInt | None = None  #: in env_template: turns of its episodes; null = agent.max_turn
    max_turn_tokens: of.PositiveInt | None = None  #: in env_template: tokens of a turn; null = agent.max_turn_tokens

    @property
    def is_set(self) -> bool:
        """Says whether an environment is named."""
        return self.name is not None or self.path is not None


# The name of what a program gives as an object, or an agent class of its own brings.
GIVEN = "given"
# Of all environments together: `env_template`'s entries have none of their own.
HOME_SETTINGS = ("isolation", "num_workers", "network", "memory_gb")


class EnvironmentHome(NamedTuple):
    """Says where environments live: threads, processes or Ray actors, how many at once, and a process's limits."""

    isolation: Literal["thread", "process", "ray"] = "thread"
    num_workers: int | None = None
    network: bool = True
    memory_gb: float | None = None


class AgentConfig(of.Section):
    """Episodes of several turns in an environment, beside the rollout engine."""

    cls: of.CustomClassConfig = of.CustomClassConfig()
    environment: EnvironmentChoice = EnvironmentChoice()
    suite: of.CustomClassConfig = of.CustomClassConfig()
    agent_length: of.PositiveInt | None = None  #: episodes of a step before ×n; null = data.train_batch_size
    val_length: of.NonNegativeInt = 0  #: episodes of a validation, the same every time; 0 = no validation
    max_turn: of.TurnCount = 10  #: turns of an episode
    max_turn_tokens: of.PositiveInt | None = None  #: tokens of a turn; a longer one is closed and played
    include_state: bool = True  #: add get_state_description() to observations that lack it
    max_observation_chars: of.PositiveInt = 20000  #: a longer observation is cut in its middle
    tools: tuple[str, ...] = ()  #: calculator, python, environment_step, FILE.py:NAME of a Tool, or verl's tools.yaml
    parser: Literal["json", "react", "function"] = "function"  #: how tool calls are written in the model's text
    step_timeout_s: of.PositiveFloat | None = 120.0  #: seconds for one call of the environment; null = no deadline
    episode_timeout_s: of.PositiveFloat | None = None  #: seconds for all of an episode's calls; null = no deadline
    on_failure: Literal["zero", "mask", "refill"] = "refill"  #: a crash: reward 0, left out, or played again
    max_refills: of.NonNegativeInt = 3  #: refill: how often one episode is tried again, before it is masked
    max_failure_rate: of.Fraction = 0.5  #: of the attempts of three steps; a run above it stops; 1 = never
    observation_loss_coef: of.NonNegativeFloat = 0.0  #: weight of predicting what the environment says (ECHO)
    overflow_reward: float = 0.0  #: added where an episode is cut by the limit of its tokens
    trial_episodes: of.NonNegativeInt = 4  #: episodes at start-up of each kind: random answers, garbage, quitting, cut
    allow_different_tasks: bool = False  #: let a group's members begin differently; otherwise that stops the run
    tools_unsafe: bool = False  #: let the python tool run where the kernel gives it no walls
    episodes_dir: of.OutputPath | None = None  #: write every episode, for replay, to STEP.jsonl in this folder
