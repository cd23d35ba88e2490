"""The models of a rank, built as the workers build them but without numbers; and their passes.

Invariant: a model is built by the code that builds it in a run, inside `without_numbers`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from features.memory_plan.planned_run import PlannedRun
from features.memory_plan.terms import Phase
from training.config import FSDPConfig, MicroBatching, OptimConfig
from workers.critic_worker import CriticWorker
from workers.dp_actor import DataParallelPPOActor
from workers.dp_critic import DataParallelPPOCritic
from workers.fsdp_workers import ActorRolloutRefWorker
from workers.model.builder import ModelSpec
from workers.model.update_loop import UpdateLoop


@dataclass(frozen=True, kw_only=True)
class ModelPass:
    """Describes a pass of a model over a step's rows.

    Args:
        phase: which the pass is.
        limits: of its micro-batches.
        updates: it goes backward too, over mini-batches.
        num_mini_batches: that the rows are cut into.
        entropy_mode: what a pass that reads log-probs computes beside them; None for values.
    """

    phase: Phase
    limits: MicroBatching
    updates: bool = False
    num_mini_batches: int = 1
    entropy_mode: str | None = None


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """Holds a model of a rank.

    Args:
        loop: its forward and its loss.
        fsdp: how it is sharded and offloaded.
        passes: over it, in the order of a step; none: only its weights are planned.
        optim: what trains it.
    """

    loop: UpdateLoop
    fsdp: FSDPConfig
    passes: tuple[ModelPass, ...] = ()
    optim: OptimConfig | None = None


@contextmanager
def without_numbers(mode: FakeTensorMode) -> Iterator[None]:
    """Builds models of fake tensors in the block; these cannot be moved, and stay in place."""

    def stay(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return module

    with mode, patch.object(nn.Module, "to", stay):
        yield


def build_models(run: PlannedRun) -> list[PlannedModel]:
    """Builds the models that a rank has beside the engine."""
    config = run.config
    models = [build_policy(run)]
    reference = reference_spec(run)
    # The actor's model, with LoRA, is the reference too.
    is_policy = config.actor_rollout_ref.model.lora_rank > 0 and reference == run.spec
    if config.need_reference and not is_policy:
        models.append(build_reference(run, reference))
    if config.need_critic:
        models.append(build_critic(run))
    if config.reward_model.enable:
        models.append(build_reward_model(run))
    return models


def reference_spec(run: PlannedRun) -> ModelSpec:
    """Names the reference's model: the policy's, unless it has a path of its own."""
    return replace(run.spec, path=run.config.actor_rollout_ref.ref.model.path or run.spec.path)


def build_policy(run: PlannedRun) -> PlannedModel:
    """Builds the policy, which gives log-probs and is updated."""
    policy = run.config.actor_rollout_ref
    log_probs = ModelPass(
        phase="log-probs", limits=policy.log_prob_micro_batching, entropy_mode="value"
    )
    update = ModelPass(
        phase="actor update",
        limits=policy.actor.micro_batching,
        updates=True,
        num_mini_batches=run.batch_plan.actor.mini_batches,
    )
    fsdp = policy.actor.fsdp_config
    loop = load_policy(run, fsdp, run.spec, trainable=True)
    return PlannedModel(loop=loop, fsdp=fsdp, passes=(log_probs, update), optim=policy.actor.optim)


def build_reference(run: PlannedRun, spec: ModelSpec) -> PlannedModel:
    """Builds the reference, which gives log-probs alone."""
    policy = run.config.actor_rollout_ref
    log_probs = ModelPass(phase="reference", limits=policy.ref_micro_batching, entropy_mode="none")
    fsdp = policy.ref.fsdp_config
    loop = load_policy(run, fsdp, spec, trainable=False)
    return PlannedModel(loop=loop, fsdp=fsdp, passes=(log_probs,))


def load_policy(
    run: PlannedRun, fsdp: FSDPConfig, spec: ModelSpec, *, trainable: bool
) -> DataParallelPPOActor:
    """Builds a policy and how it is run, as `ActorRolloutRefWorker` does."""
    worker = ActorRolloutRefWorker(run.config, "actor")
    model, settings = worker.load_policy(fsdp, spec, trainable)
    actor = run.config.actor_rollout_ref.actor
    return DataParallelPPOActor(actor, model, forward=settings, critic=run.config.critic)


def build_critic(run: PlannedRun) -> PlannedModel:
    """Builds the critic, which gives values and is updated."""
    worker = CriticWorker(run.config)
    worker.init_model(1, run.batch_plan)
    limits = worker.section.micro_batching
    values = ModelPass(phase="values", limits=limits)
    update = ModelPass(
        phase="critic update",
        limits=limits,
        updates=True,
        num_mini_batches=run.batch_plan.critic.mini_batches,
    )
    fsdp = worker.section.fsdp_config
    return PlannedModel(
        loop=worker.critic, fsdp=fsdp, passes=(values, update), optim=worker.section.optim
    )


def build_reward_model(run: PlannedRun) -> PlannedModel:
    """Builds the reward model, of which only the weights are planned."""
    model = run.config.reward_model.model
    module = ModelSpec(model, str(model.path), run.spec.device).reward_model()
    loop = DataParallelPPOCritic(run.config.critic, module)
    return PlannedModel(loop=loop, fsdp=FSDPConfig())
