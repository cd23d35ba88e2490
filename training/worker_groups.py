"""A run's worker groups: their processes are started pool by pool, then each loads its models.

Invariant: engines load last, because they size their cache by what the others left free.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.async_rollout.dedicated_engines import DedicatedEngines
from training.config import PPOConfig
from training.run.checkpoint_contents import ACTOR, CRITIC
from training.run.ray_cluster import has_gpus
from training.run.roles import ResourcePoolManager, Role
from training.run.run_lock import OWNER_FILE
from training.run.worker_group_protocol import (
    CriticGroup,
    PlayingGroup,
    PolicyGroup,
    ReferenceGroup,
    RewardModelGroup,
    TrainedGroup,
)
from workers.ranks.dispatch import ClassWithInitArgs, create_colocated_worker_cls
from workers.ranks.local_group import LocalWorkerGroup
from workers.ranks.ray_group import RayWorkerGroup

# The roles that the policy may be trained in; a run has one of them.
POLICY_ROLES = (Role.ActorRolloutRef, Role.ActorRollout, Role.ActorRef, Role.Actor)


@dataclass(frozen=True)
class WorkerGroups:
    """Holds a run's worker groups by what they do; None where a run has no such role.

    Attributes:
        policy: the actor.
        engines: what samples: the policy's group itself, or dedicated engines.
        reference: of KL terms; the policy's group where it holds the reference too.
        critic: the value model.
        reward_model: scores responses beside the reward function, or in its place.
    """

    policy: PolicyGroup
    engines: PlayingGroup
    reference: ReferenceGroup
    critic: CriticGroup | None
    reward_model: RewardModelGroup | None

    def by_checkpoint_folder(self) -> dict[str, TrainedGroup]:
        """Returns the group that writes each folder of a checkpoint."""
        groups: dict[str, TrainedGroup] = {ACTOR: self.policy}
        if self.critic is not None:
            groups[CRITIC] = self.critic
        return groups


def start_workers(
    config: PPOConfig,
    role_worker_mapping: Mapping[Role, type],
    resource_pool_manager: ResourcePoolManager,
    worker_group_cls: type[LocalWorkerGroup | RayWorkerGroup],
    *,
    run_dir: Path,
    resources: ExitStack,
) -> dict[Role, Any]:
    """Starts each pool's processes, which hold the workers of its roles, without models yet.

    Args:
        run_dir: the run's folder, which every rank must see.
        resources: gets what ends the processes.
    Returns:
        the worker group of each role.
    """
    groups: dict[Role, Any] = {}
    use_gpu = has_gpus(config.trainer)
    for pool, roles in resource_pool_manager.pools(role_worker_mapping, use_gpu=use_gpu):
        workers = {
            role.value: _worker_to_build(role, role_worker_mapping[role], config) for role in roles
        }
        started = worker_group_cls.start(pool, create_colocated_worker_cls(workers))
        for role in roles:
            groups[role] = started[role.value]
        # Any group of a pool ends the processes of all of them.
        any_group = started[roles[0].value]
        resources.callback(any_group.shutdown)
        any_group.require_shared(run_dir / OWNER_FILE)
    return groups


def _worker_to_build(role: Role, worker_cls: type, config: PPOConfig) -> ClassWithInitArgs:
    """Returns the worker's class with its arguments; the policy's takes its role, too."""
    if role in (Role.Critic, Role.RewardModel):
        return ClassWithInitArgs(worker_cls, config)
    return ClassWithInitArgs(worker_cls, config, role.value)


def load_models(
    groups: Mapping[Role, Any], config: PPOConfig, total_training_steps: int
) -> WorkerGroups:
    """Lets every group load its models, the policy's and the engines last.

    Args:
        groups: what `start_workers` started.
        total_training_steps: over which learning rate schedules run.
    """
    plan = config.batch_plan
    policy = next(groups[role] for role in POLICY_ROLES if role in groups)
    if Role.RewardModel in groups:
        groups[Role.RewardModel].init_model()
    for role in (Role.Critic, Role.RefPolicy):
        if role in groups:
            groups[role].init_model(total_training_steps, plan)
    policy_steps = max(total_training_steps - config.trainer.critic_warmup, 1)
    policy.init_model(policy_steps, plan)
    engines = policy
    if Role.Rollout in groups:
        groups[Role.Rollout].init_model(total_training_steps, plan)
        engines = DedicatedEngines(groups[Role.Rollout], policy)
        engines.sync_weights(version=0)
    return WorkerGroups(
        policy=policy,
        engines=engines,
        reference=groups.get(Role.RefPolicy, policy),
        critic=groups.get(Role.Critic),
        reward_model=groups.get(Role.RewardModel),
    )
