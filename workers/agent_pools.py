"""Opens what plays beside an engine, of each kind of episodes that the specs are of.

Invariant: limits and deadlines are those of the config; nothing here knows episodes.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from custom.confine import Limits
from training.config import PPOConfig
from workers.environments.pool import EnvironmentPool
from workers.rollout.kinds import EpisodeSpec, by_kind
from workers.rollout.mixed_pool import MixedPool, Replies


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


def open_environments(
    config: PPOConfig, specs: Sequence[Any], max_tokens: int, replies: Replies | None
) -> EnvironmentPool:
    """Opens the pool of environments, as a kind of episodes.

    Args:
        max_tokens: of the longest row, which environments do not ask.
        replies: a queue for what they say; None: one of its own.
    """
    return open_pool(config, specs, replies=replies)


def open_pools(config: PPOConfig, specs: Sequence[EpisodeSpec], max_tokens: int) -> Any:
    """Opens the pool of all specs: of one kind its own, of several one that joins theirs.

    Args:
        max_tokens: of the longest row.
    """
    makers = []
    for kind, numbers in by_kind(specs):
        of_kind = [specs[number] for number in numbers]
        make_pool = partial(kind.load(kind.open_pool), config, of_kind, max_tokens)
        makers.append((numbers, make_pool))
    if len(makers) == 1:
        [(_, make_pool)] = makers
        return make_pool(None)
    return MixedPool(makers)
