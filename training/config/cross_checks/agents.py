"""Checks environments and programs against the rest of the run."""

from collections.abc import Iterator

from training.config.schema.agent import POLICY, AgentConfig, turn_length_problems
from training.config.schema.ppo import PPOConfig


def problems(config: PPOConfig) -> Iterator[str]:
    """Yields what agents lack; what is wrong with an environment is in resources/agents.py."""
    agent = config.agent
    yield from _program_problems(agent, config)
    if agent.observation_loss_coef and not config.environments:
        yield (
            f"agent.observation_loss_coef={agent.observation_loss_coef} learns what "
            "environments say, and there is none"
        )
    if config.environments:
        yield from turn_length_problems(
            "agent", agent.max_turn_tokens, config.data.max_response_length
        )
    lives_in_ray = bool(config.environments) and agent.environment.isolation == "ray"
    if lives_in_ray and not config.trainer.use_ray:
        yield (
            "agent.environment.isolation=ray needs trainer.launcher=ray; process has the "
            "same protection without it"
        )


def warnings(config: PPOConfig) -> Iterator[str]:
    """Yields that an environment which hangs is never ended, or reaches no model."""
    agent = config.agent
    if agent.models and config.environments and not config.environment_home.network:
        yield (
            "agent.models: the environments' processes have no network, so that they reach "
            "no model; agent.environment.network=true gives it to them"
        )
    is_thread = config.environment_home.isolation == "thread"
    has_deadline = agent.step_timeout_s is not None or agent.episode_timeout_s is not None
    if config.environments and is_thread and not has_deadline:
        yield (
            "agent.step_timeout_s=null with isolation=thread: an environment that hangs stops "
            "the run; give a deadline here or in agent.episode_timeout_s"
        )


def _program_problems(agent: AgentConfig, config: PPOConfig) -> Iterator[str]:
    """Yields what settings of programs contradict."""
    yield from _player_problems(agent, config)
    plays_programs = any(choice.is_program for choice in config.environments)
    yield from _program_host_problems(agent, config, plays_programs)
    if plays_programs:
        yield from _played_program_problems(agent)
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


def _player_problems(agent: AgentConfig, config: PPOConfig) -> Iterator[str]:
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


def _played_program_problems(agent: AgentConfig) -> Iterator[str]:
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


def _program_host_problems(
    agent: AgentConfig, config: PPOConfig, plays_programs: bool
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
