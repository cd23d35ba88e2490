"""The workers: thin compositions of a model, its optimiser, a rollout engine and their checkpoints.

Each registered method takes and returns a DataProto or plain values, so that a worker can live in the driver's process or elsewhere. The config
is never changed here; row counts per mini-batch are derived from it.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Literal

import torch
import transformers
from torch import nn

from custom.agent import AgentSpec
from data.protocol import DataProto
from training.config import (
    ActorRolloutRefConfig,
    BatchPlan,
    CriticConfig,
    CriticModelConfig,
    ModelConfig,
    PPOConfig,
)
from workers.dp_actor import DataParallelPPOActor
from workers.dp_critic import DataParallelPPOCritic
from workers.model import state as model_state
from workers.model.attention import check_shared_sequences, use_own_attention
from workers.model.builder import ModelSpec, find_device, torch_dtype
from workers.model.checkpoint_writer import CheckpointWriter
from workers.model.forward import PolicyModel, ValueModel, can_share_prompts, check_forward
from workers.model.packing import ForwardSettings
from workers.model.update import build_optimizer, build_scheduler
from workers.multi_turn_rollout import AgentRollout
from workers.ranks.distributed import on_device, rank, rank_group, shard_model, start_process_group
from workers.ranks.worker_group import Dispatch, register
from workers.rollout.base import BaseRollout, noise_seed
from workers.rollout.weight_sync import iter_weights, weight_manifest

logger = logging.getLogger(__name__)

LOG_PROB_READS = ("prompts", "responses", "response_mask", "attention_mask")

Role = Literal["actor", "rollout", "ref", "actor_rollout", "actor_rollout_ref"]


class ActorRolloutRefWorker:
    """The policy in the uses that `role` names: trained, sampled from, and frozen as the reference."""

    def __init__(self, config: PPOConfig, role: Role) -> None:
        self.config = config
        self.policy: ActorRolloutRefConfig = config.actor_rollout_ref
        self.role = role
        self.device = find_device(config.trainer.device)
        self.agents: AgentRollout | None = None

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, total_training_steps: int, plan: BatchPlan) -> None:
        """Loads what the role needs. `total_training_steps` (calls of `update_actor`) shapes the learning rate's schedule."""
        start_worker(self.config, self.device)
        self.plan = plan.actor
        spec = self.spec = ModelSpec(self.policy.model, str(self.policy.model.path), self.device)
        if "actor" in self.role:
            self.module = spec.causal_lm(trainable=True)
            settings = self._forward_settings(self.module)
            check_forward(self.module)
            model = PolicyModel(self.module)
            shard_model(model, self.policy.actor.fsdp_config, settings.dtype, self.device)
            optim = self.policy.actor.optim
            self.optimizer = build_optimizer(self.module, optim)
            self.scheduler = build_scheduler(self.optimizer, optim, total_training_steps)
            self.actor = DataParallelPPOActor(self.policy.actor, model, self.optimizer, forward=settings)
            self.writer = CheckpointWriter()
        if "ref" in self.role:
            frozen = spec.causal_lm(trainable=False)
            settings, reference = self._forward_settings(frozen), PolicyModel(frozen)
            shard_model(reference, self.policy.ref.fsdp_config, settings.dtype, self.device)
            self.ref = DataParallelPPOActor(self.policy.actor, reference, forward=settings)
        self._offload()  # the engine sizes its cache by what is left free
        if "rollout" in self.role:
            self.rollout = build_rollout(self.config, spec)
            self.rollout.sleep()
            self.sync_weights()

    @register(Dispatch.ONE_TO_ALL)
    def sync_weights(self) -> None:
        """Sends the policy's weights to the rollout engine, which wakes up for it."""
        self.rollout.wake_up()
        dtype = torch_dtype(self.policy.rollout.dtype)
        with on_device(self.actor.actor_module, None, self.device, self.policy.actor.fsdp_config):
            self.rollout.update_weights(iter_weights(self.module, dtype), weight_manifest(self.module))

    @register(Dispatch.ONE_TO_ALL)
    def sleep_rollout(self) -> None:
        self.rollout.sleep()

    @register(Dispatch.RANK_ZERO)
    def ranks_per_engine(self) -> int:
        return self.policy.rollout.tensor_model_parallel_size

    @register(Dispatch.RANK_ZERO)
    def ranks_per_sequence(self) -> int:
        return self.policy.actor.ulysses_sequence_parallel_size

    @register(Dispatch.DP_COMPUTE_PROTO, ranks_per_chunk="ranks_per_engine")
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """See `BaseRollout.generate_sequences`; what is not seeded by request draws as `noise_seed` says."""
        engine = rank() // self.ranks_per_engine()
        torch.manual_seed(noise_seed(prompts.meta_info, engine))
        return self.rollout.generate_sequences(prompts)

    @register(Dispatch.ONE_TO_ALL)
    def start_agents(self, specs: list[AgentSpec]) -> None:
        """Makes ready for episodes: opens the environments' home beside each engine; one that was open is closed."""
        self.close_agents()
        self.agents = AgentRollout(
            self.config, self.rollout, self.spec.tokenizer, specs, rank_group(self.ranks_per_engine())
        )

    @register(Dispatch.DP_COMPUTE_PROTO, ranks_per_chunk="ranks_per_engine", keeps_rows=False)
    def run_episodes(self, described: DataProto) -> DataProto:
        """Plays episodes; see `AgentRollout.rows_of`."""
        if self.agents is None:
            raise ValueError("run_episodes has no agents: call start_agents first")
        engine = rank() // self.ranks_per_engine()
        torch.manual_seed(noise_seed(described.meta_info, engine))
        return self.agents.run(described)

    @register(Dispatch.ONE_TO_ALL)
    def close_agents(self) -> None:
        if self.agents is not None:
            self.agents.close()

    @register(Dispatch.DP_COMPUTE_PROTO, reads=LOG_PROB_READS, ranks_per_chunk="ranks_per_sequence")
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`old_log_probs` and `entropys`, (B, response_len) each."""
        data = self._with_temperature(data)
        with on_device(self.actor.actor_module, None, self.device, self.policy.actor.fsdp_config):
            log_probs, entropies = self.actor.compute_log_prob(
                data, calculate_entropy=True, limits=self.policy.log_prob_micro_batching
            )
        return DataProto.from_dict(tensors={"old_log_probs": log_probs, "entropys": entropies})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=LOG_PROB_READS, ranks_per_chunk="ranks_per_sequence")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """`ref_log_prob`, (B, response_len)."""
        data = self._with_temperature(data)
        with on_device(self.ref.actor_module, None, self.device, self.policy.ref.fsdp_config):
            log_probs, _ = self.ref.compute_log_prob(data, limits=self.policy.ref_micro_batching)
        return DataProto.from_dict(tensors={"ref_log_prob": log_probs})

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=(*LOG_PROB_READS, "advantages", "old_log_probs", "ref_log_prob", "rollout_log_probs"),
        ranks_per_chunk="ranks_per_sequence",
    )
    def update_actor(self, data: DataProto) -> dict[str, float]:
        """One call of `update_policy` and one step of the schedule; returns metrics."""
        self.writer.wait_until_copied()
        with (
            strictly_deterministic(self.config.trainer.deterministic),
            on_device(self.actor.actor_module, self.optimizer, self.device, self.policy.actor.fsdp_config),
        ):
            metrics = self.actor.update_policy(self._with_temperature(data), self.plan)
        metrics["actor/lr"] = self.scheduler.get_last_lr()[0]
        self.scheduler.step()
        return metrics

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        """Begins to save; `checkpoint_written` says when it is done."""
        contents = self.policy.actor.checkpoint.save_contents
        export = model_state.huggingface_export(
            Path(folder) / "huggingface", self.module, self.spec.tokenizer, weights="hf_model" in contents
        )
        state = (self.module, self.optimizer, self.scheduler)
        model_state.save(self.writer, Path(folder), *state, contents, export)

    @register(Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool) -> bool:
        """See `CheckpointWriter.is_written`."""
        return self.writer.is_written(wait)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        contents = self.policy.actor.checkpoint.load_contents
        model_state.load(Path(folder), self.module, self.optimizer, self.scheduler, contents)

    def _forward_settings(self, module: nn.Module) -> ForwardSettings:
        share = self.policy.actor.use_prefix_grouper
        return forward_settings(self.policy.model, share, module, self.device, self.ranks_per_sequence())

    def _offload(self) -> None:
        """Sends what is kept in CPU memory between calls there."""
        if "actor" in self.role:
            with on_device(self.actor.actor_module, self.optimizer, self.device, self.policy.actor.fsdp_config):
                pass
        if "ref" in self.role:
            with on_device(self.ref.actor_module, None, self.device, self.policy.ref.fsdp_config):
                pass

    def _with_temperature(self, data: DataProto) -> DataProto:
        """Log-probs are always those of the distribution that was sampled."""
        meta_info = data.meta_info | {"temperature": self.policy.rollout.temperature}
        return DataProto(batch=data.batch, non_tensor_batch=data.non_tensor_batch, meta_info=meta_info)


class CriticWorker:
    """The value model and its optimiser."""

    def __init__(self, config: PPOConfig) -> None:
        self.run_config = config
        self.config: CriticConfig = config.resolved_critic
        self.device = find_device(config.trainer.device)

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, total_training_steps: int, plan: BatchPlan) -> None:
        """Loads the model, its optimiser and the schedule over `total_training_steps` calls of `update_critic`."""
        start_worker(self.run_config, self.device)
        self.plan = plan.critic
        cfg = self.config
        self.module = ModelSpec(cfg.model, str(cfg.model.path), self.device).value_model()
        settings = forward_settings(
            cfg.model, cfg.use_prefix_grouper, self.module, self.device, self.ranks_per_sequence()
        )
        model = ValueModel(self.module)
        shard_model(model, cfg.fsdp_config, settings.dtype, self.device)
        self.optimizer = build_optimizer(self.module, cfg.optim)
        self.scheduler = build_scheduler(self.optimizer, cfg.optim, total_training_steps)
        self.critic = DataParallelPPOCritic(cfg, model, self.optimizer, forward=settings)
        self.writer = CheckpointWriter()
        with self._on_device():  # afterwards offloaded, where that is configured
            pass

    def _on_device(self) -> AbstractContextManager[None]:
        return on_device(self.critic.critic_module, self.optimizer, self.device, self.config.fsdp_config)

    @register(Dispatch.DP_COMPUTE_PROTO, reads=LOG_PROB_READS, ranks_per_chunk="ranks_per_sequence")
    def compute_values(self, data: DataProto) -> DataProto:
        """`values`, (B, response_len)."""
        with self._on_device():
            return DataProto.from_dict(tensors={"values": self.critic.compute_values(data)})

    @register(Dispatch.RANK_ZERO)
    def ranks_per_sequence(self) -> int:
        assert self.config.ulysses_sequence_parallel_size is not None
        return self.config.ulysses_sequence_parallel_size

    @register(
        Dispatch.DP_COMPUTE_PROTO, reads=(*LOG_PROB_READS, "values", "returns"), ranks_per_chunk="ranks_per_sequence"
    )
    def update_critic(self, data: DataProto) -> dict[str, float]:
        self.writer.wait_until_copied()
        with strictly_deterministic(self.run_config.trainer.deterministic), self._on_device():
            metrics = self.critic.update_critic(data, self.plan)
        metrics["critic/lr"] = self.scheduler.get_last_lr()[0]
        self.scheduler.step()
        return metrics

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        """Begins to save; `checkpoint_written` says when it is done."""
        contents = self.config.checkpoint.save_contents
        model_state.save(self.writer, Path(folder), self.module, self.optimizer, self.scheduler, contents)

    @register(Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool) -> bool:
        """See `CheckpointWriter.is_written`."""
        return self.writer.is_written(wait)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        contents = self.config.checkpoint.load_contents
        model_state.load(Path(folder), self.module, self.optimizer, self.scheduler, contents)


def start_worker(config: PPOConfig, device: torch.device) -> None:
    """What a process does once before it builds models: joins the other ranks, and keeps to deterministic operations if asked."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single rank saves by itself
    if config.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the process's first matrix product
        torch.use_deterministic_algorithms(True, warn_only=True)
    start_process_group(device)


@contextmanager
def strictly_deterministic(deterministic: bool) -> Iterator[None]:
    """Where a run is `deterministic`, so is the block, or it raises.

    On CUDA the backward pass of attention takes its deterministic kernels only then (with `warn_only` it warns and takes the others), while
    sampling has operations for which there are none.
    """
    if not deterministic:
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


def forward_settings(
    model: ModelConfig | CriticModelConfig,
    share_prompts: bool,
    module: nn.Module,
    device: torch.device,
    sequence_ranks: int = 1,
) -> ForwardSettings:
    """How this model is run; prompts are shared where it is asked for, and rows packed, if the model's attention allows it.

    Raises:
        ValueError: it does not allow `sequence_ranks` ranks to share a sequence.
    """
    plain = can_share_prompts(module)
    if share_prompts and not plain:
        logger.info(
            "%s has windowed or other than sdpa attention: a group's prompt is computed for each row", model.path
        )
    packs = model.use_remove_padding and plain and use_own_attention(module)
    if sequence_ranks > 1:
        check_shared_sequences(module, sequence_ranks)
    return ForwardSettings(
        device=device,
        dtype=torch_dtype(model.dtype),
        strip_padding=model.use_remove_padding,
        share_prompts=share_prompts and plain,
        pack_rows=packs,
        sequence_group=rank_group(sequence_ranks),
    )


def build_rollout(config: PPOConfig, spec: ModelSpec) -> BaseRollout:
    """The engine that `rollout.name` names; its package is imported only here."""
    rollout = config.resolved_rollout
    if rollout.name == "vllm":
        from workers.vllm_rollout_spmd import vLLMRollout

        return vLLMRollout(rollout, spec)
    from workers.hf_rollout import HFRollout

    return HFRollout(rollout, spec)
