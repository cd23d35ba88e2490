"""Checks environments and the records of episodes against the rest of the run."""

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
    if agent.record_gradients:
        yield from _gradient_record_problems(config)
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


def _gradient_record_problems(config: PPOConfig) -> Iterator[str]:
    """Yields what keeps a run from recording each episode's share of the gradient."""
    trainer = config.trainer
    if trainer.num_ranks > 1:
        yield (
            f"agent.record_gradients=true needs one rank, and trainer.nnodes={trainer.nnodes} x "
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} are {trainer.num_ranks}: set both "
            "to 1, or take it out"
        )
    if trainer.train_finished_groups:
        yield (
            "agent.record_gradients=true compares each episode with the whole gradient, which "
            "trainer.train_finished_groups=true has only at the end: take one of the two out"
        )
    if not config.agent.records_episodes:
        yield (
            "agent.record_gradients=true has nowhere to go with agent.episodes_keep=0: set that "
            "above 0"
        )
