"""Which roles a run has, which worker class plays each, and on which ranks.

Invariant: every role that the config needs has a class and a pool, by default.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from enum import Enum

from training.config import PPOConfig
from workers.ranks.resource_pool import RayResourcePool

# The pool of all ranks that train, and that of engines that have ranks of their own.
TRAINING_POOL = "global_pool"
ENGINE_POOL = "rollout_pool"


class Role(Enum):
    """Names what a worker group does."""

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    Critic = "critic"
    # An alias from older guides.
    CriticValue = "critic"
    RefPolicy = "ref"
    RewardModel = "reward_model"
    ActorRolloutRef = "actor_rollout_ref"
    # Beside dedicated engines.
    ActorRef = "actor_ref"


class ResourcePoolManager:
    """Maps each role to the pool of ranks that it runs in.

    Args:
        resource_pool_spec: pool name -> ranks on each node.
        mapping: role -> pool name.

    Raises:
        ValueError: a role's pool is not in the spec.
    """

    def __init__(self, resource_pool_spec: dict[str, list[int]], mapping: dict[Role, str]) -> None:
        unknown = set(mapping.values()) - resource_pool_spec.keys()
        if unknown:
            raise ValueError(
                f"roles are mapped to unknown pools {sorted(unknown)}; "
                f"pools: {list(resource_pool_spec)}"
            )
        self.resource_pool_spec = resource_pool_spec
        self.mapping = mapping

    def pools(
        self, roles: Collection[Role], *, use_gpu: bool
    ) -> Iterator[tuple[RayResourcePool, list[Role]]]:
        """Yields each pool that has any of `roles`, with those.

        The CPU's threads are shared among a node's ranks.
        """
        ranks_on_a_node = sum(max(ranks) for ranks in self.resource_pool_spec.values())
        threads = max(1, (os.cpu_count() or 1) // ranks_on_a_node)
        for name, ranks in self.resource_pool_spec.items():
            placed = [role for role in roles if self.mapping[role] == name]
            if placed:
                yield RayResourcePool(tuple(ranks), use_gpu, cpus=threads), placed


def need_reference_policy(role_worker_mapping: Mapping[Role, type]) -> bool:
    """Checks whether the mapping has a worker for the reference policy."""
    return not role_worker_mapping.keys().isdisjoint({Role.RefPolicy, Role.ActorRolloutRef})


def need_reward_model(role_worker_mapping: Mapping[Role, type]) -> bool:
    """Checks whether the mapping has a worker for a reward model."""
    return Role.RewardModel in role_worker_mapping


def need_critic(config: PPOConfig) -> bool:
    """Checks whether the config's estimator, or `critic.enable`, asks for a critic."""
    return config.need_critic


def default_role_mapping(config: PPOConfig) -> dict[Role, type]:
    """Returns the worker class of every role that this config needs, the policy's first."""
    from workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker

    mapping: dict[Role, type] = {}
    if config.trainer.rollout_n_gpus:
        mapping[Role.ActorRef if config.need_reference else Role.Actor] = ActorRolloutRefWorker
        mapping[Role.Rollout] = ActorRolloutRefWorker
    elif config.need_reference:
        mapping[Role.ActorRolloutRef] = ActorRolloutRefWorker
    else:
        mapping[Role.ActorRollout] = ActorRolloutRefWorker
    if config.need_critic:
        mapping[Role.Critic] = CriticWorker
    if config.reward_model.enable:
        mapping[Role.RewardModel] = RewardModelWorker
    return mapping


def default_resource_pool(config: PPOConfig) -> ResourcePoolManager:
    """Returns one pool of all ranks, shared by every role, and one for dedicated engines."""
    ranks_on_a_node = config.trainer.n_gpus_per_node
    engine_ranks = config.trainer.rollout_n_gpus
    pools = {TRAINING_POOL: [ranks_on_a_node] * config.trainer.nnodes}
    pool_of_role = dict.fromkeys(default_role_mapping(config), TRAINING_POOL)
    if engine_ranks:
        whole_nodes = engine_ranks // ranks_on_a_node
        # Less than a node has is part of one.
        pools[ENGINE_POOL] = [ranks_on_a_node] * whole_nodes or [engine_ranks]
        pool_of_role[Role.Rollout] = ENGINE_POOL
    return ResourcePoolManager(pools, pool_of_role)
