"""Opens what plays beside an engine as a config asks for it: environments, programs, or both.

Invariant: limits and deadlines of either are those of the config; nothing here knows episodes.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from custom.agent import AgentSpec
from custom.confine import Limits
from features.programs.play import ProgramPlayer
from features.programs.spec import ProgramSpec
from training.config import PPOConfig
from workers.environments.pool import EnvironmentPool
from workers.ranks.worker_host import LOOPBACK
from workers.rollout.episode import Player

if TYPE_CHECKING:
    from features.programs.mixed_pool import MixedPool
    from features.programs.pool import ProgramPool

AgentSpecs = Sequence[AgentSpec | ProgramSpec]


def open_pool(config: PPOConfig, specs: Sequence[Any], **settings: Any) -> EnvironmentPool:
    """Opens the environment pool that the config asks for; `settings` win."""
    home = config.environment_home
    arguments: dict[str, Any] = {
        "isolation": home.isolation,
        "num_workers": home.num_workers,
        "limits": Limits(network=home.network, memory_gb=home.memory_gb),
        "step_timeout_s": config.agent.step_timeout_s,
        "episode_timeout_s": config.agent.episode_timeout_s,
        "step_wall_timeout_s": config.agent.step_wall_timeout_s,
    }
    return EnvironmentPool(specs, **(arguments | settings))


def open_program_pool(
    config: PPOConfig,
    specs: dict[int, ProgramSpec],
    max_tokens: int,
    replies: Any = None,
    port: int = 0,
) -> "ProgramPool":
    """Opens a pool of programs, whose functions live where the config's environments do.

    Args:
        max_tokens: of the longest row.
        replies: a queue for what they say; None: one of its own.
        port: of their server; 0: any that is free.
    """
    # It needs aiohttp, which runs without programs do without.
    from features.programs.attempt import Deadlines
    from features.programs.pool import ProgramPool

    return ProgramPool(
        specs,
        deadlines=Deadlines(config.agent.step_timeout_s, config.agent.episode_timeout_s),
        max_tokens=max_tokens,
        port=port,
        host=program_host(config),
        homes=partial(open_pool, config),
        replies=replies,
    )


def program_host(config: PPOConfig) -> str:
    """Returns the address at which programs find their server: this machine's own, or its node's.

    Where Ray does not run in this process, as in a trial, nobody on another node asks.
    """
    if config.agent.program_host == "loopback" or not config.trainer.use_ray:
        return LOOPBACK
    import ray

    if not ray.is_initialized():
        return LOOPBACK
    address: str = ray.util.get_node_ip_address()
    return address


def open_mixed_pool(
    config: PPOConfig, specs: AgentSpecs, max_tokens: int
) -> "EnvironmentPool | MixedPool":
    """Opens the pool of the config's environments and programs."""
    if not any(isinstance(spec, ProgramSpec) for spec in specs):
        return open_pool(config, specs)
    from features.programs.mixed_pool import MixedPool

    def make_environments(agents: list[AgentSpec], replies: Any) -> EnvironmentPool:
        return open_pool(config, agents, replies=replies)

    def make_programs(programs: dict[int, ProgramSpec], replies: Any) -> "ProgramPool":
        return open_program_pool(config, programs, max_tokens, replies)

    return MixedPool(specs, make_environments, make_programs)


def program_players(specs: AgentSpecs) -> dict[int, Player]:
    """Returns how the episodes of those specs are played that are programs."""
    return {
        index: ProgramPlayer(spec.client_sampling)
        for index, spec in enumerate(specs)
        if isinstance(spec, ProgramSpec)
    }
