"""Holds the settings of `agent` and of the environments that agents act in."""

from collections.abc import Iterator
from dataclasses import field
from typing import Any, Literal, NamedTuple

from pydantic import model_validator

from training.config.schema.common import CustomClassConfig
from training.config.section import (
    Command,
    Fraction,
    InputPath,
    NonNegativeFloat,
    NonNegativeInt,
    ObjectName,
    ParserName,
    PositiveFloat,
    PositiveInt,
    Section,
    ToolName,
    TurnCount,
)

# The name of an environment that a program passes as an object, or that an agent class of one's
# own brings along.
PASSED_AS_OBJECT = "given"
# A run with tools and rows that names no environment acts in this one.
DATASET_ROWS = "custom.envs.dataset_row:DatasetRowEnvironment"


class EnvironmentChoice(Section):
    """What the agent acts in: `name`, or `path` and `cls`; or the program that it is."""

    #: gymnasium:ID, reasoning_gym:NAME, textarena:ID, textworld:NAME, verifiers:NAME,
    #: openenv:URL or PACKAGE.MODULE:CLASS
    name: str | None = None
    path: InputPath | None = None  #: Python file with a class of your own
    cls: str | None = None  #: name of the class in that file
    kwargs: dict[str, Any] = field(default_factory=dict)  #: its settings
    command: Command = ()  #: in env_template: a program, as programs.command
    program: ObjectName | None = None  #: in env_template: a program, as programs.function
    #: where it runs; null = process for libraries that run texts, else thread
    isolation: Literal["thread", "process", "ray"] | None = None
    #: calls (threads) or environments at once; null = no limit
    num_workers: PositiveInt | None = None
    network: bool | None = None  #: of its process; null = none where a library runs texts
    #: GiB that its process may take; null = 4 where a library runs texts
    memory_gb: PositiveFloat | None = None
    prompt_template: str | None = None  #: how an adapter words its observations; null = its own
    #: in env_template: its share of the episodes, relative to the others'
    weight: PositiveFloat = 1.0
    #: in env_template: turns of its episodes; null = agent.max_turn
    max_turn: PositiveInt | None = None
    #: in env_template: tokens of a turn; null = agent.max_turn_tokens
    max_turn_tokens: PositiveInt | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_name(cls, entry: Any) -> Any:
        """Reads a text as the environment's name, or as FILE.py:CLASS."""
        if not isinstance(entry, str):
            return entry
        path, _, class_name = entry.rpartition(":")
        if path.endswith(".py"):
            return {"path": path, "cls": class_name}
        return {"name": entry}

    @property
    def is_set(self) -> bool:
        """Returns whether an environment or a program is named."""
        return self.name is not None or self.path is not None or self.plays_by_itself

    @property
    def plays_by_itself(self) -> bool:
        """Returns whether it is a program, which asks for its turns itself."""
        return bool(self.command) or self.program is not None


class EnvironmentHome(NamedTuple):
    """Sets where environments live: threads, processes or Ray actors, and a process's limits.

    Its fields are settings of all environments together: `env_template`'s entries have none of
    their own.
    """

    isolation: Literal["thread", "process", "ray"] = "thread"
    num_workers: int | None = None
    network: bool = True
    memory_gb: float | None = None


class AgentConfig(Section):
    """Episodes of several turns in an environment, beside the rollout engine."""

    cls: CustomClassConfig = CustomClassConfig()
    environment: EnvironmentChoice = EnvironmentChoice()
    suite: CustomClassConfig = CustomClassConfig()
    #: episodes of a step before ×n; null = data.train_batch_size
    agent_length: PositiveInt | None = None
    #: episodes of a validation, the same every time; 0 = no validation
    val_length: NonNegativeInt = 0
    max_turn: TurnCount = 10  #: turns of an episode
    #: tokens of a turn; a longer one is closed and played
    max_turn_tokens: PositiveInt | None = None
    #: what the next prompt consists of once a context is full or due: keep (the whole conversation,
    #: which ends with its context), last_turns, drop_tool_results, drop_thinking, summarise, or
    #: FILE.py:CLASS; see context.*
    context: ObjectName = "keep"
    #: tokens of an episode over all of its contexts, their prompts aside; null = no limit
    max_episode_tokens: PositiveInt | None = None
    include_state: bool = True  #: add get_state_description() to observations that lack it
    max_observation_chars: PositiveInt = 20000  #: a longer observation is cut in its middle
    #: calculator, python, environment_step, FILE.py:NAME of a Tool, or verl's tools.yaml
    tools: tuple[ToolName, ...] = ()
    #: how tool calls are written: function, json, react, a family's form (hermes, qwen3_xml, glm,
    #: harmony, deepseek, kimi, minimax, mistral, gemma, llama3_json, llama_function, pythonic,
    #: json_fence), auto (the chat template's), or vllm:NAME, a parser of vLLM's
    parser: ParserName = "function"
    #: seconds for one call of the environment; null = no deadline
    step_timeout_s: PositiveFloat | None = 120.0
    #: seconds for one call by the wall's clock, where a busy machine stretches step_timeout_s or
    #: episode_timeout_s; at least as many as these; null = for ever
    step_wall_timeout_s: PositiveFloat | None = 1200.0
    #: seconds for all of an episode's calls; null = no deadline
    episode_timeout_s: PositiveFloat | None = None
    #: a crash: reward 0, left out, or played again
    on_failure: Literal["zero", "mask", "refill"] = "refill"
    #: refill: how often one episode is tried again, before it is masked
    max_refills: NonNegativeInt = 3
    #: of the attempts of three steps; a run above it stops; 1 = never
    max_failure_rate: Fraction = 0.5
    #: weight of predicting what the environment says (ECHO)
    observation_loss_coef: NonNegativeFloat = 0.0
    overflow_reward: float = 0.0  #: added where an episode is cut by the limit of its tokens
    #: episodes at start-up of each kind: random answers, garbage, quitting, cut
    trial_episodes: NonNegativeInt = 4
    #: let a group's members begin differently; otherwise that stops the run
    allow_different_tasks: bool = False
    tools_unsafe: bool = False  #: let the python tool run where the kernel gives it no walls


def turn_length_problems(
    section: str, max_turn_tokens: int | None, response_length: int
) -> Iterator[str]:
    """Yields that a turn, as `section` limits it, may be longer than all turns together."""
    if max_turn_tokens is not None and max_turn_tokens > response_length:
        yield (
            f"{section}.max_turn_tokens={max_turn_tokens} is above "
            f"data.max_response_length={response_length}, which holds all turns"
        )
