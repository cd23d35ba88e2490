"""Which roles a run has, which worker class plays each, and on which ranks.

Invariant: every role that the config needs has a class and a pool, by default.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from enum import Enum

from training.config import PPOConfig
from workers.ranks.worker_group import RayResourcePool


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
    # Beside engines that have ranks of their own.
    ActorRef = "actor_ref"


class ResourcePoolManager:
    """Says which role runs in which pool of ranks.

    Args:
        resource_pool_spec: pool name -> ranks on each node.
        mapping: role -> pool name.
    """

    def __init__(self, resource_pool_spec: dict[str, list[int]], mapping: dict[Role, str]) -> None:
        if unknown := set(mapping.values()) - resource_pool_spec.keys():
            raise ValueError(
                f"roles are mapped to unknown pools {sorted(unknown)}; pools: {[*resource_pool_spec]}"
            )
        self.resource_pool_spec = resource_pool_spec
        self.mapping = mapping

    def pools(
        self, roles: Collection[Role], *, use_gpu: bool
    ) -> Iterator[tuple[RayResourcePool, list[Role]]]:
        """Yields each pool that has any of `roles`, with those; the CPU's threads are shared among a node's ranks."""
        threads = max(
            1,
            (os.cpu_count() or 1) // sum(max(ranks) for ranks in self.resource_pool_spec.values()),
        )
        for name, ranks in self.resource_pool_spec.items():
            if mine := [role for role in roles if self.mapping[role] == name]:
                yield RayResourcePool(tuple(ranks), use_gpu, cpus=threads), mine


def need_reference_policy(role_worker_mapping: Mapping[Role, type]) -> bool:
    """Says whether the mapping has a worker for the reference policy."""
    return not role_worker_mapping.keys().isdisjoint({Role.RefPolicy, Role.ActorRolloutRef})


def need_reward_model(role_worker_mapping: Mapping[Role, type]) -> bool:
    """Says whether the mapping has a worker for a reward model."""
    return Role.RewardModel in role_worker_mapping


def need_critic(config: PPOConfig) -> bool:
    """Says whether the config's estimator, or `critic.enable`, asks for a critic."""
    return config.need_critic


def default_role_mapping(config: PPOConfig) -> dict[Role, type]:
    """Returns the worker class of every role that this config needs."""
    from workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker

    if config.trainer.rollout_n_gpus:
        policy = {Role.ActorRef if config.need_reference else Role.Actor: ActorRolloutRefWorker}
        policy[Role.Rollout] = ActorRolloutRefWorker
    else:
        policy = {
            Role.ActorRolloutRef
            if config.need_reference
            else Role.ActorRollout: ActorRolloutRefWorker
        }
    critic = {Role.Critic: CriticWorker} if config.need_critic else {}
    scorer = {Role.RewardModel: RewardModelWorker} if config.reward_model.enable else {}
    return {**policy, **critic, **scorer}


def default_resource_pool(config: PPOConfig) -> ResourcePoolManager:
    """Returns one pool of all ranks, shared by every role, and one of engines with ranks of their own."""
    each, own, roles = (
        config.trainer.n_gpus_per_node,
        config.trainer.rollout_n_gpus,
        default_role_mapping(config),
    )
    pool, homes = (
        {"global_pool": [each] * config.trainer.nnodes},
        dict.fromkeys(roles, "global_pool"),
    )
    if own:
        pool["rollout_pool"], homes[Role.Rollout] = [each] * (own // each) or [own], "rollout_pool"
    return ResourcePoolManager(pool, homes)
