"""Holds the settings of `agent` and of the environments that agents act in."""

from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import model_validator

from training.config.schema.common import CustomClassConfig
from training.config.schema.mcp_servers import McpServerChoice, mcp_server_problems
from training.config.schema.side_models import SideModel, side_model_problems
from training.config.schema.verifiers import PREFIX, VerifiersConfig
from training.config.section import (
    Command,
    Fraction,
    InputPath,
    NonNegativeFloat,
    NonNegativeInt,
    ObjectName,
    PositiveFloat,
    PositiveInt,
    Section,
    ToolName,
    TurnCount,
)

if TYPE_CHECKING:
    from training.config.schema.ppo import PPOConfig

# The name of an environment that a program passes as an object, or that an agent class of one's
# own brings along.
PASSED_AS_OBJECT = "given"
# As a command's first word: the interpreter that the run itself has.
OWN_PYTHON = ("python", "python3")
# By this name programs ask for the policy, as by any that is none of agent.models.
POLICY = "policy"
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
    command: Command = ()  #: in env_template: a program, as agent.command
    program: ObjectName | None = None  #: in env_template: a program, as agent.program
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
        return self.name is not None or self.path is not None or self.is_program

    @property
    def is_program(self) -> bool:
        """Returns whether it is a program, which asks for its turns itself."""
        return bool(self.command) or self.program is not None

    @property
    def is_of_verifiers(self) -> bool:
        """Returns whether it is an environment of verifiers."""
        return self.name is not None and self.name.startswith(PREFIX)


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
    #: a program that plays: words, or one text, such as "python my_agent.py"
    command: Command = ()
    #: FILE.py:NAME of `async def NAME(task, client) -> reward`, in place of a command
    program: ObjectName | None = None
    #: modules of the command's interpreter, from whose import programs are forked
    preload: tuple[str, ...] = ()
    #: what pays a command: its last line of output, or its exit code
    program_reward: Literal["stdout", "exit_code"] = "stdout"
    #: a program's own temperature and the like: sampled as the run does, or refused
    client_sampling: Literal["override", "refuse"] = "override"
    #: where programs find the policy: on their own machine alone, or at the node's address (Ray)
    program_host: Literal["loopback", "node"] = "loopback"
    #: seconds for which a program's request waits; null = for ever
    request_timeout_s: PositiveFloat | None = None
    verifiers: VerifiersConfig = VerifiersConfig()
    #: episodes of a step before ×n; null = data.train_batch_size
    agent_length: PositiveInt | None = None
    #: episodes of a validation, the same every time; 0 = no validation
    val_length: NonNegativeInt = 0
    max_turn: TurnCount = 10  #: turns of an episode
    #: tokens of a turn; a longer one is closed and played
    max_turn_tokens: PositiveInt | None = None
    include_state: bool = True  #: add get_state_description() to observations that lack it
    max_observation_chars: PositiveInt = 20000  #: a longer observation is cut in its middle
    #: calculator, python, environment_step, FILE.py:NAME of a Tool, or verl's tools.yaml
    tools: tuple[ToolName, ...] = ()
    #: MCP servers by name, whose tools stand beside these: command, args, … or url
    #: (features/mcp/README.md)
    mcp_servers: dict[str, McpServerChoice] = field(default_factory=dict)
    #: how tool calls are written in the model's text
    parser: Literal["json", "react", "function"] = "function"
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
    #: models beside the policy by name, each a mapping: base_url, model, …
    #: (features/judges/README.md)
    models: dict[str, SideModel] = field(default_factory=dict)
    tools_unsafe: bool = False  #: let the python tool run where the kernel gives it no walls

    def problems(self, config: "PPOConfig") -> Iterator[str]:
        """Yields what agents lack; what is wrong with an environment is in resources/agents.py."""
        yield from program_problems(self, config)
        yield from side_model_problems(self.models)
        yield from mcp_server_problems(self.mcp_servers)
        if self.observation_loss_coef and not config.environments:
            yield (
                f"agent.observation_loss_coef={self.observation_loss_coef} learns what "
                "environments say, and there is none"
            )
        if config.environments:
            yield from turn_length_problems("agent", self.max_turn_tokens, config)
        lives_in_ray = bool(config.environments) and self.environment.isolation == "ray"
        if lives_in_ray and not config.trainer.use_ray:
            yield (
                "agent.environment.isolation=ray needs trainer.launcher=ray; process has the "
                "same protection without it"
            )

    def warnings(self, config: "PPOConfig") -> Iterator[str]:
        """Yields that an environment which hangs is never ended, or reaches no model."""
        if self.models and config.environments and not config.environment_home.network:
            yield (
                "agent.models: the environments' processes have no network, so that they reach "
                "no model; agent.environment.network=true gives it to them"
            )
        is_thread = config.environment_home.isolation == "thread"
        has_deadline = self.step_timeout_s is not None or self.episode_timeout_s is not None
        if config.environments and is_thread and not has_deadline:
            yield (
                "agent.step_timeout_s=null with isolation=thread: an environment that hangs stops "
                "the run; give a deadline here or in agent.episode_timeout_s"
            )


def program_problems(agent: AgentConfig, config: "PPOConfig") -> Iterator[str]:
    """Yields what settings of programs contradict."""
    yield from player_problems(agent, config)
    plays_programs = any(choice.is_program for choice in config.environments)
    yield from program_host_problems(agent, config, plays_programs)
    if plays_programs:
        yield from played_program_problems(agent)
    elif agent.preload or agent.request_timeout_s is not None:
        yield "agent.preload and agent.request_timeout_s are a program's: set agent.command"
    if agent.preload:
        for choice in config.environments:
            words = choice.command
            if len(words) < 2 or not words[1].endswith(".py"):
                yield (
                    f"agent.preload forks a command of the form [PYTHON, FILE.py, ...]; "
                    f"{list(words)} is none"
                )


def player_problems(agent: AgentConfig, config: "PPOConfig") -> Iterator[str]:
    """Yields what is set beside the program that plays for all, and cannot be."""
    has_program = bool(agent.command) or agent.program is not None
    if agent.command and agent.program is not None:
        yield "agent.command and agent.program both name a program: give one of them"
    if has_program and (agent.environment.is_set or config.env_template):
        yield (
            "agent.command and agent.program name the one thing that plays: take "
            "agent.environment and env_template out, or give the program as an entry of "
            "env_template"
        )
    if has_program and agent.cls.path is not None:
        yield "agent.cls is an environment's agent, and agent.command is one itself: give one"
    if has_program and (agent.tools or agent.mcp_servers):
        yield (
            "agent.tools and agent.mcp_servers are an environment's; a program sends its own tools "
            "with each request"
        )


def played_program_problems(agent: AgentConfig) -> Iterator[str]:
    """Yields what does not go together with a program that plays."""
    if POLICY in agent.models:
        yield (
            f"agent.models.{POLICY}: by this name programs ask the policy itself; give the model "
            "another one"
        )
    if agent.observation_loss_coef:
        yield (
            f"agent.observation_loss_coef={agent.observation_loss_coef} learns what environments "
            "say; of a program it is not known which of the words between answers are its own: 0"
        )


def program_host_problems(
    agent: AgentConfig, config: "PPOConfig", plays_programs: bool
) -> Iterator[str]:
    """Yields where the address at which programs find the policy is of no use to them."""
    if agent.program_host == "node" and not plays_programs:
        yield "agent.program_host=node is a program's: set agent.command or agent.program"
    elif agent.program_host == "node" and not config.trainer.use_ray:
        yield (
            "agent.program_host=node lets other nodes of a Ray cluster ask, and there is none: set "
            "trainer.launcher=ray, or take it out"
        )
    has_function = any(choice.program is not None for choice in config.environments)
    lives_in_ray = config.environment_home.isolation == "ray" and config.trainer.nnodes > 1
    if has_function and lives_in_ray and agent.program_host == "loopback":
        yield (
            "agent.program with isolation=ray may run on another node than the server that it "
            "asks: set agent.program_host=node, or isolation=process"
        )


def turn_length_problems(
    section: str, max_turn_tokens: int | None, config: "PPOConfig"
) -> Iterator[str]:
    """Yields that a turn, as `section` limits it, may be longer than all turns together."""
    response_length = config.data.max_response_length
    if max_turn_tokens is not None and max_turn_tokens > response_length:
        yield (
            f"{section}.max_turn_tokens={max_turn_tokens} is above "
            f"data.max_response_length={response_length}, which holds all turns"
        )
