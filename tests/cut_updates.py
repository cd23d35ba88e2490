"""The core's update of cut episodes: a step's phases, the actor's and the critic's updates.

As `train_step` calls them, on tiny models in float32; the gradient is what the optimiser is handed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification

from data.protocol import DUMMY_UID, DataProto
from tests.uncut_trees import VOCABULARY, Episode, infos_of
from training.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    AlgorithmConfig,
    CriticConfig,
    DataConfig,
    FSDPConfig,
    PPOConfig,
    RolloutConfig,
    TrainerConfig,
)
from training.step_phases import StepPhases
from training.worker_groups import WorkerGroups
from workers.dp_actor import DataParallelPPOActor
from workers.dp_critic import DataParallelPPOCritic
from workers.model.attention import use_packed_attention
from workers.model.forward_settings import ForwardSettings
from workers.model.policy_model import PolicyModel, ValueModel
from workers.model.probe_set import UpdateProbes
from workers.model.token_counts import TokenCounts
from workers.ranks.process_groups import rank, world_size
from workers.ranks.sharding import full_tensor, shard_model

# Where nothing is clipped.
NO_CLIP = 1e9
LAYOUTS = {
    "shared": {"pack_rows": True, "key_cost": 0.0},
    "packed": {"pack_rows": True},
    "padded": {},
    "unstripped": {"strip_padding": False},
}
SPLITS: dict[str, dict[str, int]] = {
    "whole": {"ppo_max_token_len_per_gpu": 100_000},
    "tokens": {"ppo_max_token_len_per_gpu": 130},
    "rows": {"ppo_micro_batch_size_per_gpu": 1},
    "three rows": {"ppo_micro_batch_size_per_gpu": 3},
}


@dataclass
class Models:
    """The policy, the one that sampled, the reference, and the critic before and in its update."""

    policy: nn.Module
    old: nn.Module
    ref: nn.Module
    critic: nn.Module
    old_critic: nn.Module

    def in_float64(self) -> Models:
        """The same weights, as plain transformers models in float64."""
        return Models(*(as_plain(model) for model in vars(self).values()))


def as_plain(model: nn.Module) -> nn.Module:
    plain = copy.deepcopy(model).double()
    plain.set_attn_implementation("eager")
    return plain.eval()


def make_models(seed: int = 0) -> Models:
    """Tiny models of two layers, whose weights are some way apart."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        num_labels=1,
        classifier_dropout=0.0,
        initializer_range=0.3,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    policy = LlamaForCausalLM(config)
    critic = LlamaForTokenClassification(config)
    models = Models(
        policy=policy,
        old=moved(policy, 0.02),
        ref=moved(policy, 0.05),
        critic=critic,
        old_critic=moved(critic, 0.05),
    )
    for model in vars(models).values():
        model.eval()
        assert use_packed_attention(model)
    return models


def moved(model: nn.Module, far: float) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(far * torch.randn_like(parameter))
    return other


class Recorder(torch.optim.SGD):
    """Moves nothing, and keeps the gradient of each mini-batch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.parameters(), lr=0.0)
        self.seen: list[Tensor] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        columns = []
        for group in self.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                whole = torch.zeros_like(parameter) if grad is None else grad
                columns.append(full_tensor(whole))
        self.seen.append(torch.cat([column.flatten() for column in columns]).double())


@dataclass
class Workers:
    """Stands for all worker groups: models that are read, or learn from this rank's rows."""

    models: Models
    settings: ForwardSettings
    actor: DataParallelPPOActor
    critic: DataParallelPPOCritic
    config: PPOConfig

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        names = ["old_log_probs", "entropys"]
        mode = "value"
        if batch.meta_info.get("sum_pi_squared"):
            names.append("sum_pi_squared")
            mode = "squares"
        sampler = DataParallelPPOActor(self.actor.config, self.models.old, forward=self.settings)
        columns = sampler.read(batch, "compute_log_prob", None, mode)
        return DataProto.from_dict(tensors=dict(zip(names, columns, strict=True)))

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        reference = DataParallelPPOActor(self.actor.config, self.models.ref, forward=self.settings)
        log_probs, _ = reference.compute_log_prob(batch)
        return DataProto.from_dict(tensors={"ref_log_prob": log_probs})

    def compute_values(self, batch: DataProto) -> DataProto:
        before = DataParallelPPOCritic(
            self.critic.config, self.models.old_critic, forward=self.settings
        )
        return DataProto.from_dict(tensors={"values": before.compute_values(batch)})

    def update_actor(self, batch: DataProto) -> dict[str, float]:
        return self.actor.update_policy(own_part(batch), self.config.batch_plan.actor)

    def update_critic(self, batch: DataProto) -> dict[str, float]:
        return self.critic.update_critic(own_part(batch), self.config.batch_plan.critic)


def own_part(batch: DataProto) -> DataProto:
    return batch.chunk(world_size())[rank()]


@dataclass
class Updated:
    """The gradients of a step's mini-batches, and its metrics."""

    actor: list[Tensor]
    critic: list[Tensor]
    metrics: dict[str, float]
    kl_coefficient: float
    # Of the episodes, those whose rows lie on several ranks.
    divided: int


def config_of(
    estimator: str = "grpo",
    *,
    actor: Mapping[str, Any] | None = None,
    critic: Mapping[str, Any] | None = None,
    algorithm: Mapping[str, Any] | None = None,
    split: str = "whole",
    groups: int = 2,
    members: int = 3,
    ranks: int = 1,
) -> PPOConfig:
    """The settings of a step; by hand they stand in `uncut_gradients.KNOBS`."""
    return PPOConfig(
        data=DataConfig(train_batch_size=groups),
        trainer=TrainerConfig(n_gpus_per_node=ranks),
        actor_rollout_ref=ActorRolloutRefConfig(
            actor=ActorConfig(
                grad_clip=NO_CLIP,
                clip_ratio_low=0.2,
                clip_ratio_high=0.3,
                **SPLITS[split],
                **(actor or {}),
            ),
            rollout=RolloutConfig(n=members),
        ),
        critic=CriticConfig(grad_clip=NO_CLIP, **SPLITS[split], **(critic or {})),
        algorithm=AlgorithmConfig(
            adv_estimator=estimator,
            gamma=0.9,
            lam=0.8,
            turn_gamma=0.7,
            turn_lam=0.6,
            gigpo_step_weight=0.5,
            gdpo_reward_keys=("acc", "form") if estimator == "gdpo" else (),
            gdpo_reward_weights=(1.0, 0.5) if estimator == "gdpo" else (),
            distillation_coef=0.8,
            distillation_task="rloo" if estimator == "on_policy_distillation" else None,
            **(algorithm or {}),
        ),
    )


def update(
    models: Models,
    batch: DataProto,
    episodes: list[Episode],
    config: PPOConfig,
    *,
    layout: str = "shared",
    on_policy: bool = False,
    state: dict[str, float] | None = None,
) -> Updated:
    """Makes a step's phases and updates, in the order of `train_step`.

    Args:
        on_policy: the update's own log-probs are the old ones.
        state: what the estimator kept of earlier steps.
    """
    settings = ForwardSettings(**LAYOUTS[layout])
    policy = config.actor_rollout_ref.actor
    trained = PolicyModel(models.policy), ValueModel(models.critic)
    if world_size() > 1:
        trained = copy.deepcopy(trained)
        for module in trained:
            shard_model(module, FSDPConfig(), torch.float32, settings.device)
    recorders = Recorder(trained[0]), Recorder(trained[1])
    actor = DataParallelPPOActor(
        policy,
        trained[0],
        recorders[0],
        config.algorithm.rollout_correction,
        config.agent.observation_loss_coef,
        forward=settings,
        probes=UpdateProbes([TokenCounts()]),
    )
    critic = DataParallelPPOCritic(
        config.critic,
        trained[1],
        recorders[1],
        forward=settings,
        probes=UpdateProbes([TokenCounts()]),
    )
    workers: Any = Workers(models, settings, actor, critic, config)
    groups = WorkerGroups(workers, workers, workers, workers, None)
    phases = StepPhases(config, groups, lambda data: data.batch["environment_rewards"])
    phases.estimator_state = dict(state or {})

    batch = phases.arrange(batch)
    scores, infos = phases.start_reward(batch)()
    infos = infos or infos_of(batch, episodes)
    if not on_policy:
        batch, _ = phases.add_old_log_probs(batch)
    if phases.needs_reference():
        batch = batch.union(workers.compute_ref_log_prob(batch))
    batch = batch.union(workers.compute_values(batch))
    batch = phases.add_rewards(batch, scores, infos)
    metrics = phases.apply_kl_penalty(batch)
    batch = phases.add_advantages(batch)
    samples = phases.resample(batch, 1)
    metrics |= workers.update_critic(replace(samples))
    metrics |= phases.update_actor(samples)
    return Updated(
        actor=recorders[0].seen,
        critic=recorders[1].seen,
        metrics=metrics,
        kl_coefficient=phases.kl_controller.value,
        divided=count_divided(batch),
    )


def count_divided(batch: DataProto) -> int:
    """Counts the episodes that have rows on several ranks."""
    ranks_of: dict[str, set[int]] = {}
    for number, part in enumerate(batch.chunk(world_size())):
        for name in part.non_tensor_batch["episode_id"]:
            ranks_of.setdefault(name, set()).add(number)
    return sum(len(ranks) > 1 for name, ranks in ranks_of.items() if name != DUMMY_UID)
