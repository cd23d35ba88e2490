"""Checks environments against the rest of the run."""

from collections.abc import Iterator

from training.config.schema.agent import turn_length_problems
from training.config.schema.ppo import PPOConfig


def problems(config: PPOConfig) -> Iterator[str]:
    """Yields what agents lack; what is wrong with an environment is in resources/agents.py."""
    agent = config.agent
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
    """Yields that an environment which hangs is never ended."""
    agent = config.agent
    is_thread = config.environment_home.isolation == "thread"
    has_deadline = agent.step_timeout_s is not None or agent.episode_timeout_s is not None
    if config.environments and is_thread and not has_deadline:
        yield (
            "agent.step_timeout_s=null with isolation=thread: an environment that hangs stops "
            "the run; give a deadline here or in agent.episode_timeout_s"
        )
