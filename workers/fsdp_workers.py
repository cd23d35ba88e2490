"""The workers: each composes models, their optimisers, a rollout engine and checkpoints into the calls of its roles.

A registered method takes and returns a DataProto or plain values, so that a worker can live in the driver's process or
elsewhere. Invariant: the config never changes here; how a batch is cut for updates follows from it (`BatchPlan`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from custom.agent import AgentSpec
from data.prompts import encode_chat
from data.protocol import DataProto
from training.batch.torch_functional import EntropyMode
from training.config import ActorConfig, ActorRolloutRefConfig, BatchPlan, CriticConfig, FSDPConfig, PPOConfig
from workers.dp_actor import DataParallelPPOActor
from workers.dp_critic import DataParallelPPOCritic
from workers.model import state as model_state
from workers.model.builder import ModelSpec, find_device, require_same_vocabulary, torch_dtype
from workers.model.checkpoint_writer import CheckpointWriter
from workers.model.forward import PolicyModel, ValueModel, check_forward, forward_settings
from workers.model.packing import FORWARD_FIELDS, ForwardSettings
from workers.model.update import build_optimizer, build_scheduler
from workers.multi_turn_rollout import AgentRollout
from workers.ranks.distributed import offload, on_device, rank_group, shard_model
from workers.ranks.process import expandable_segments, start_worker, strictly_deterministic
from workers.ranks.worker_group import Dispatch, register
from workers.rollout.base import BaseRollout
from workers.rollout.canary import Canary
from workers.rollout.weight_sync import iter_weights, weight_manifest

logger = logging.getLogger(__name__)
# What the policy's update reads of a batch, as far as it is there.
UPDATE_FIELDS: tuple[str, ...] = ("advantages", "old_log_probs", "ref_log_prob", "rollout_log_probs")
UPDATE_FIELDS += ("rollout_is_weights", "turn_ids", "episode_share", "observation_mask")
CRITIC_FIELDS = (*FORWARD_FIELDS, "values", "returns", "episode_share")
Role = Literal["actor", "rollout", "ref", "actor_rollout", "actor_rollout_ref"]
Metrics = dict[str, float]


class TrainedWorker:
    """Holds a module that is trained, with its optimiser and schedule, and saves and loads them."""

    # What a Hugging Face folder is written with, where a checkpoint is to have one.
    tokenizer: PreTrainedTokenizerBase | None = None

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.device = find_device(config.trainer.device)

    def _make_trainable(self, module: nn.Module, config: ActorConfig | CriticConfig, total_training_steps: int) -> None:
        self.module, self.checkpoint = module, config.checkpoint
        self.optimizer = build_optimizer(module, config.optim)
        self.scheduler = build_scheduler(self.optimizer, config.optim, total_training_steps)
        self.state = self.module, self.optimizer, self.scheduler
        self.writer = CheckpointWriter()

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        """Begins to save; `checkpoint_written` says when it is done."""
        model_state.save(self.writer, Path(folder), self.state, self.checkpoint.save_contents, self.tokenizer)

    @register(Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool) -> bool:
        """Says whether the checkpoint is on disk; see `CheckpointWriter.is_written`."""
        return self.writer.is_written(wait)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        """Reads what `save_checkpoint` wrote, in place."""
        model_state.load(Path(folder), self.state, self.checkpoint.load_contents)

    @register(Dispatch.RANK_ZERO)
    def ranks_per_sequence(self) -> int:
        """Returns the size of a sequence-parallel group."""
        return self.config.actor_rollout_ref.actor.ulysses_sequence_parallel_size

    def _update(self, part: str, place: AbstractContextManager[None], update: Callable[[], Metrics]) -> Metrics:
        """Updates the model, once a checkpoint has its copy, and makes one step of the schedule; adds PART/lr."""
        self.writer.wait_until_copied()
        with expandable_segments(self.device), strictly_deterministic(self.config.trainer.deterministic), place:
            metrics = update()
        metrics[f"{part}/lr"] = self.scheduler.get_last_lr()[0]
        self.scheduler.step()
        return metrics


class ActorRolloutRefWorker(TrainedWorker):
    """Holds the policy in the uses that `role` names: trained, sampled from, and frozen as the reference."""

    def __init__(self, config: PPOConfig, role: Role) -> None:
        super().__init__(config)
        self.policy: ActorRolloutRefConfig = config.actor_rollout_ref
        self.role = role
        self.agents: AgentRollout | None = None

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, total_training_steps: int, plan: BatchPlan) -> None:
        """Loads what the role needs; the schedule runs over `total_training_steps` calls of `update_actor`."""
        start_worker(self.device, deterministic=self.config.trainer.deterministic)
        self.plan = plan.actor
        self.spec = ModelSpec(self.policy.model, str(self.policy.model.path), self.device)
        if "actor" in self.role:
            cfg = self.policy.actor
            model, settings = self._load_policy(cfg.fsdp_config, self.spec, trainable=True)
            self._make_trainable(model.lm, cfg, total_training_steps)
            self.tokenizer = self.spec.tokenizer
            more = self.config.algorithm.rollout_correction, self.config.agent.observation_loss_coef
            self.actor = DataParallelPPOActor(cfg, model, self.optimizer, *more, forward=settings)
            offload(model, self.optimizer, cfg.fsdp_config)
        if "ref" in self.role:
            spec = replace(self.spec, path=self.policy.ref.model.path or self.spec.path)
            if spec != self.spec:
                require_same_vocabulary(self.spec, spec)
            model, settings = self._load_policy(self.policy.ref.fsdp_config, spec, trainable=False)
            self.ref = DataParallelPPOActor(self.policy.actor, model, forward=settings)
            offload(model, None, self.policy.ref.fsdp_config)
        # Last, as the engine sizes its cache by what is left free.
        if "rollout" in self.role:
            self.rollout = build_rollout(self.config, self.spec)
            self.rollout.sleep()
            self.canary = self._canary() if self.config.trainer.alarms != "off" else None
            self.sync_weights()

    @register(Dispatch.ONE_TO_ALL)
    def sync_weights(self) -> dict[str, float]:
        """Sends the policy's weights to the rollout engine, which wakes up for it; returns what the canaries tell.

        Its cache comes last: the policy that is offloaded need not share the device with it.
        """
        self.rollout.wake_up("weights")
        dtype = torch_dtype(self.policy.rollout.dtype)
        with self._actor_on_device():
            self.rollout.update_weights(iter_weights(self.module, dtype), weight_manifest(self.module))
            limits = self.policy.log_prob_micro_batching
            actor = self.actor.compute_log_prob(self.canary.batch(), limits=limits)[0] if self.canary else None
        self.rollout.wake_up("kv_cache")
        return self.canary.compare(actor) if self.canary and actor is not None else {}

    def _canary(self) -> Canary | None:
        if type(self.rollout).score is BaseRollout.score or self.rollout.max_model_len < 3:
            logger.warning("%s scores nothing: no alarm watches the weight sync", type(self.rollout).__name__)
            return None
        render = partial(encode_chat, self.spec.tokenizer, **self.config.data.apply_chat_template_kwargs)
        return Canary(self.rollout, len(self.spec.tokenizer), render)

    @register(Dispatch.ONE_TO_ALL)
    def sleep_rollout(self) -> None:
        """Has the rollout engine give its memory to the trainer."""
        self.rollout.sleep()

    @register(Dispatch.RANK_ZERO)
    def ranks_per_engine(self) -> int:
        """Returns the size of a tensor-parallel group."""
        return self.policy.rollout.tensor_model_parallel_size

    @register(Dispatch.DP_COMPUTE_PROTO, ranks_per_chunk="ranks_per_engine")
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Answers every prompt; see `BaseRollout.generate_sequences`."""
        return self.rollout.generate_sequences(prompts)

    @register(Dispatch.ONE_TO_ALL)
    def start_agents(self, specs: list[AgentSpec]) -> None:
        """Opens an environment pool beside each engine, for episodes; one that was open is closed."""
        self.close_agents()
        group = rank_group(self.ranks_per_engine())
        self.agents = AgentRollout(self.config, self.rollout, self.spec.tokenizer, specs, group)

    @register(Dispatch.DP_COMPUTE_PROTO, ranks_per_chunk="ranks_per_engine", keeps_rows=False)
    def run_episodes(self, described: DataProto) -> DataProto:
        """Plays episodes; see `AgentRollout.rows_of`."""
        if self.agents is None:
            raise ValueError("run_episodes has no agents: call start_agents first")
        return self.agents.run(described)

    @register(Dispatch.ONE_TO_ALL)
    def close_agents(self) -> None:
        """Closes the environment pool, if one is open."""
        if self.agents is not None:
            self.agents.close()

    @register(Dispatch.DP_COMPUTE_PROTO, reads=FORWARD_FIELDS, ranks_per_chunk="ranks_per_sequence")
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Computes `old_log_probs` and `entropys`, with meta_info `sum_pi_squared` that too: (B, response_len) each."""
        wanted: EntropyMode = "squares" if data.meta_info.get("sum_pi_squared") else "value"
        with self._actor_on_device():
            stats = self.actor.token_stats(self._with_temperature(data), wanted, self.policy.log_prob_micro_batching)
        names = ("old_log_probs", "entropys", "sum_pi_squared")
        return DataProto.from_dict(tensors=dict(zip(names, stats, strict=False)))

    @register(Dispatch.DP_COMPUTE_PROTO, reads=FORWARD_FIELDS, ranks_per_chunk="ranks_per_sequence")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Computes `ref_log_prob`, (B, response_len)."""
        with on_device(self.ref.actor_module, None, self.device, self.policy.ref.fsdp_config):
            log_probs = self.ref.token_stats(self._with_temperature(data), "none", self.policy.ref_micro_batching)[0]
        return DataProto.from_dict(tensors={"ref_log_prob": log_probs})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=(*FORWARD_FIELDS, *UPDATE_FIELDS), ranks_per_chunk="ranks_per_sequence")
    def update_actor(self, data: DataProto) -> dict[str, float]:
        """Calls `update_policy` once and makes one step of the schedule; returns metrics."""
        update = partial(self.actor.update_policy, self._with_temperature(data), self.plan)
        return self._update("actor", self._actor_on_device(self.optimizer), update)

    def _load_policy(self, fsdp: FSDPConfig, spec: ModelSpec, trainable: bool) -> tuple[PolicyModel, ForwardSettings]:
        lm = spec.causal_lm(trainable=trainable)
        share = self.policy.actor.use_prefix_grouper
        settings = forward_settings(self.policy.model, share, lm, self.device, self.ranks_per_sequence())
        if trainable:
            check_forward(lm)
        model = PolicyModel(lm)
        shard_model(model, fsdp, settings.dtype, self.device)
        return model, settings

    def _actor_on_device(self, optimizer: torch.optim.Optimizer | None = None) -> AbstractContextManager[None]:
        return on_device(self.actor.actor_module, optimizer, self.device, self.policy.actor.fsdp_config)

    def _with_temperature(self, data: DataProto) -> DataProto:
        """Adds the temperature of sampling: log-probs are always those of the distribution that was sampled."""
        return replace(data, meta_info=data.meta_info | {"temperature": self.policy.rollout.temperature})


class CriticWorker(TrainedWorker):
    """Holds the value model and its optimiser."""

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, total_training_steps: int, plan: BatchPlan) -> None:
        """Loads the model; the schedule runs over `total_training_steps` calls of `update_critic`."""
        start_worker(self.device, deterministic=self.config.trainer.deterministic)
        self.plan, cfg = plan.critic, self.config.resolved_critic
        module = ModelSpec(cfg.model, str(cfg.model.path), self.device).value_model()
        settings = forward_settings(cfg.model, cfg.use_prefix_grouper, module, self.device, self.ranks_per_sequence())
        model = ValueModel(module)
        shard_model(model, cfg.fsdp_config, settings.dtype, self.device)
        self._make_trainable(module, cfg, total_training_steps)
        self.critic = DataParallelPPOCritic(cfg, model, self.optimizer, forward=settings)
        self._on_device = partial(on_device, model, self.optimizer, self.device, cfg.fsdp_config)
        offload(model, self.optimizer, cfg.fsdp_config)

    @register(Dispatch.DP_COMPUTE_PROTO, reads=FORWARD_FIELDS, ranks_per_chunk="ranks_per_sequence")
    def compute_values(self, data: DataProto) -> DataProto:
        """Computes `values`, (B, response_len)."""
        with self._on_device():
            return DataProto.from_dict(tensors={"values": self.critic.compute_values(data)})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=CRITIC_FIELDS, ranks_per_chunk="ranks_per_sequence")
    def update_critic(self, data: DataProto) -> dict[str, float]:
        """Calls `DataParallelPPOCritic.update_critic` once and makes one step of the schedule; returns metrics."""
        return self._update("critic", self._on_device(), partial(self.critic.update_critic, data, self.plan))


def build_rollout(config: PPOConfig, spec: ModelSpec) -> BaseRollout:
    """Builds the engine that `rollout.name` names; its package is imported only here."""
    rollout = config.resolved_rollout
    if rollout.name == "vllm":
        from workers.vllm_rollout_spmd import vLLMRollout

        return vLLMRollout(rollout, spec)
    from workers.hf_rollout import HFRollout

    return HFRollout(rollout, spec)
