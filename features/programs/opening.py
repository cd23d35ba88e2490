"""From the config to programs that play: their specs, and the pool that runs them.

Invariant: limits and deadlines are those of the config.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial

from features.programs.attempt import Deadlines
from features.programs.pool import ProgramPool
from features.programs.settings import OWN_PYTHON, ProgramsSettings
from features.programs.spec import ProgramSpec
from training.config import PPOConfig
from training.config.schema.agent import EnvironmentChoice
from training.config.schema.ppo import GUARDED_MEMORY_GB
from training.config.side_services import side_services
from workers import agent_pools
from workers.ranks.worker_host import LOOPBACK
from workers.rollout.mixed_pool import Replies


def program_spec(config: PPOConfig, choice: EnvironmentChoice) -> ProgramSpec:
    """Returns how a program is started and paid."""
    programs = config.section(ProgramsSettings)
    reward = config.custom_reward_function
    command = choice.command
    if command and command[0] in OWN_PYTHON:
        command = (sys.executable, *command[1:])
    return ProgramSpec(
        command=command,
        function=choice.program,
        preload=programs.preload,
        reward=programs.reward,
        parser=config.agent.parser,
        request_timeout_s=programs.request_timeout_s,
        client_sampling=programs.client_sampling,
        dropped_thinking=programs.dropped_thinking,
        train_models=programs.train_models,
        helper_prompts=programs.helper_prompts,
        memory_gb=config.agent.environment.memory_gb or GUARDED_MEMORY_GB,
        reward_path=reward.path,
        reward_name=reward.name,
        reward_kwargs=reward.reward_kwargs,
        max_turn=choice.max_turn,
        max_turn_tokens=choice.max_turn_tokens,
        services=side_services(config),
    )


def open_pool(
    config: PPOConfig,
    specs: Sequence[ProgramSpec],
    max_tokens: int,
    replies: Replies | None,
) -> ProgramPool:
    """Opens the pool of programs, as a kind of episodes.

    Args:
        max_tokens: of the longest row.
        replies: a queue for what they say; None: one of its own.
    """
    return open_program_pool(config, dict(enumerate(specs)), max_tokens, replies)


def open_program_pool(
    config: PPOConfig,
    specs: Mapping[int, ProgramSpec],
    max_tokens: int,
    replies: Replies | None = None,
    port: int = 0,
) -> ProgramPool:
    """Opens a pool of programs, whose functions live where the config's environments do.

    Args:
        max_tokens: of the longest row.
        replies: a queue for what they say; None: one of its own.
        port: of their server; 0: any that is free.
    """
    return ProgramPool(
        dict(specs),
        deadlines=Deadlines(
            config.agent.step_timeout_s,
            config.agent.episode_timeout_s,
            config.section(ProgramsSettings).grace_s,
        ),
        max_tokens=max_tokens,
        port=port,
        host=program_host(config),
        homes=partial(agent_pools.open_pool, config),
        replies=replies,
    )


def program_host(config: PPOConfig) -> str:
    """Returns the address at which programs find their server: this machine's own, or its node's.

    Where Ray does not run in this process, as in a trial, nobody on another node asks.
    """
    if config.section(ProgramsSettings).host == "loopback" or not config.trainer.use_ray:
        return LOOPBACK
    import ray

    if not ray.is_initialized():
        return LOOPBACK
    address: str = ray.util.get_node_ip_address()
    return address
