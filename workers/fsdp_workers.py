"""The workers: each composes models, their optimisers, a rollout engine and checkpoints into the calls of its roles.

A registered method takes and returns a DataProto or plain values, so that a worker can live in the driver's process or
elsewhere. The reward model is frozen: it gives each real row one score, on the last sampled token. Invariant: the
config never changes here; how a batch is cut for updates follows from it (`BatchPlan`).
"""

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from custom.agent import AgentSpec
from custom.reward_manager import decode_sampled
from data.containers import place_outcome_rewards
from data.protocol import DataProto
from data.turn_tokens import as_messages, encode_chat, pad_token_id
from training.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    BatchPlan,
    CriticConfig,
    FSDPConfig,
    PPOConfig,
)
from training.config.algorithm_settings import UpdatePlan
from training.config.checks import load_custom_algorithm
from training.config.settings import RolloutConfig
from workers.dp_actor import DataParallelPPOActor, DataParallelPPOCritic
from workers.model import forward as models
from workers.model import state as model_state
from workers.model.builder import ModelSpec, find_device, require_same_vocabulary, torch_dtype
from workers.model.forward import (
    FORWARD_FIELDS,
    ForwardSettings,
    PolicyModel,
    PolicyValueModel,
    ValueModel,
)
from workers.model.lora import adapter_export, without_adapters
from workers.model.state import CheckpointWriter
from workers.model.update import build_optimizer, build_scheduler
from workers.multi_turn_rollout import AgentRollout, by_group
from workers.ranks import distributed
from workers.ranks.distributed import shard_model, start_worker
from workers.ranks.worker_group import Dispatch, register
from workers.rollout.base import BaseRollout, TurnLoop
from workers.rollout.weight_sync import Canary, Manifest, iter_weights, weight_manifest

logger = logging.getLogger(__name__)
# What the policy's update reads of a batch, as far as it is there.
UPDATE_FIELDS: tuple[str, ...] = (
    "advantages",
    "old_log_probs",
    "ref_log_prob",
    "rollout_log_probs",
)
UPDATE_FIELDS += ("rollout_is_weights", "turn_ids", "episode_share", "observation_mask")
CRITIC_FIELDS = (*FORWARD_FIELDS, "values", "returns", "episode_share")
Role = Literal["actor", "rollout", "ref", "actor_rollout", "actor_rollout_ref"]
Metrics = dict[str, float]


class TrainedWorker:
    """Holds a module that is trained, with its optimiser and schedule, and saves and loads them."""

    # What a Hugging Face folder is written with, where a checkpoint is to have one.
    tokenizer: PreTrainedTokenizerBase | None = None
    plan: UpdatePlan

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.device = find_device(config.trainer.device)
        # A rank's process has registered none of the driver's.
        if config.custom_algorithm:
            load_custom_algorithm(config.custom_algorithm)

    def _make_trainable(
        self, model: nn.Module, module: nn.Module, own: ActorConfig | CriticConfig, steps: int
    ) -> None:
        """Makes optimiser and schedule, over so many steps, of the module that is saved of a sharded model."""
        self.model, self.module, self.own = model, module, own
        self.optimizer = build_optimizer(module, own.optim)
        self.scheduler = build_scheduler(self.optimizer, own.optim, steps)
        self.state = module, self.optimizer, self.scheduler
        self.writer = CheckpointWriter()
        distributed.offload(model, self.optimizer, own.fsdp_config)

    def _on_device(self, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        return distributed.on_device(self.model, optimizer, self.device, self.own.fsdp_config)

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        """Begins to save; `checkpoint_written` says when it is done."""
        model_state.save(
            self.writer, Path(folder), self.state, self.own.checkpoint.save_contents, self.tokenizer
        )

    @register(Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool) -> bool:
        """Says whether the checkpoint is on disk; see `CheckpointWriter.is_written`."""
        return self.writer.is_written(wait)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        """Reads what `save_checkpoint` wrote, in place."""
        model_state.load(Path(folder), self.state, self.own.checkpoint.load_contents)

    @register(Dispatch.RANK_ZERO)
    def ranks_per_sequence(self) -> int:
        """Returns the size of a sequence-parallel group."""
        return self.config.actor_rollout_ref.actor.ulysses_sequence_parallel_size

    def _update(
        self, part: str, update: Callable[[DataProto, UpdatePlan], Metrics], data: DataProto
    ) -> Metrics:
        """Updates the model, once a checkpoint has its copy, and makes one step of the schedule; adds PART/lr."""
        self.writer.wait_until_copied()
        exact = distributed.strictly_deterministic(self.config.trainer.deterministic)
        with distributed.expandable_segments(self.device), exact, self._on_device(self.optimizer):
            metrics = update(data, self.plan)
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
        self.channel: distributed.WeightChannel | None = None

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, total_training_steps: int, plan: BatchPlan) -> None:
        """Loads what the role needs; the schedule runs over `total_training_steps` calls of `update_actor`."""
        distributed.start_worker(self.device, deterministic=self.config.trainer.deterministic)
        self.plan = plan.actor
        self.spec = ModelSpec(self.policy.model, str(self.policy.model.path), self.device)
        if "actor" in self.role:
            cfg, config = self.policy.actor, self.config
            model, settings = self._load_policy(cfg.fsdp_config, self.spec, trainable=True)
            self._make_trainable(
                model, model.lm if model.value_head is None else model, cfg, total_training_steps
            )
            self.tokenizer = self.spec.tokenizer
            more, values = (
                (config.algorithm.rollout_correction, config.agent.observation_loss_coef),
                config.critic,
            )
            self.actor = DataParallelPPOActor(
                cfg, model, self.optimizer, *more, forward=settings, critic=values
            )
        if "ref" in self.role:
            spec = replace(self.spec, path=self.policy.ref.model.path or self.spec.path)
            if spec != self.spec:
                require_same_vocabulary(self.spec, spec)
            # The actor's model, with LoRA, is the reference without its adapters.
            shares = "actor" in self.role and self.policy.model.lora_rank > 0 and spec == self.spec
            self.ref_fsdp = (self.policy.actor if shares else self.policy.ref).fsdp_config
            if not shares:
                model, settings = self._load_policy(self.ref_fsdp, spec, trainable=False)
            self.ref = DataParallelPPOActor(self.policy.actor, model, forward=settings)
            distributed.offload(model, None, self.ref_fsdp)
        # Last, as the engine sizes its cache by what is left free.
        if "rollout" in self.role:
            self.rollout = build_rollout(self.config.resolved_rollout, self.spec)
            self.prompt_loop = TurnLoop(
                self.rollout, group=distributed.rank_group(self.ranks_per_engine())
            )
            self.rollout.records_versions = self.config.trainer.async_level > 0
        self.canary = self._canary() if self.config.trainer.alarms != "off" else None
        if self.role.startswith("actor_rollout"):
            self.rollout.sleep()
            self.sync_weights()

    @register(Dispatch.ONE_TO_ALL)
    def sync_weights(self, version: int = 0) -> dict[str, float]:
        """Sends the policy's weights to the rollout engine, which wakes up for it; returns what the canaries tell.

        Its cache comes last: the policy that is offloaded need not share the device with it.
        """
        self.rollout.wake_up("weights")
        with self._on_device():
            lm = self.actor.actor_module.lm
            if self.policy.rollout.lora_as_adapter:
                with TemporaryDirectory() as folder:
                    adapter_export(Path(folder), lm)()
                    self.rollout.load_adapter(folder)
            else:
                dtype = torch_dtype(self.policy.rollout.dtype)
                self.rollout.update_weights(iter_weights(lm, dtype), weight_manifest(lm))
            actor = self._score_canaries()
        self.rollout.wake_up("kv_cache")
        self.rollout.set_version(version)
        return self.compare_canary(actor)

    @register(Dispatch.RANK_ZERO)
    def open_weight_channel(self) -> tuple[str, int]:
        """Opens the store at which the policy's first rank and the engines with ranks of their own meet."""
        self.store, port = distributed.open_store(os.environ["MASTER_ADDR"])
        return os.environ["MASTER_ADDR"], port

    @register(Dispatch.ONE_TO_ALL)
    def join_weight_channel(self, address: tuple[str, int], size: int) -> Manifest | None:
        """Makes the channel of weights, whose first rank is the policy's; the others have none.

        Returns names and shapes of what the policy sends.
        """
        sends, self.channel = "actor" in self.role, None
        if not sends or distributed.rank() == 0:
            number = 0 if sends else distributed.rank() + 1
            self.channel = distributed.WeightChannel(address, number, size, self.device)
        return weight_manifest(self.actor.actor_module.lm) if sends else None

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(self) -> Tensor | None:
        """Sends the policy's weights over the channel; returns what it makes of the canaries."""
        with self._on_device():
            for _, tensor in iter_weights(
                self.actor.actor_module.lm, torch_dtype(self.policy.rollout.dtype)
            ):
                if self.channel is not None:
                    self.channel.broadcast(tensor.contiguous())
            return self._score_canaries()

    @register(Dispatch.ONE_TO_ALL)
    def receive_weights(self, manifest: Manifest, version: int) -> None:
        """Takes weights from the channel, between two steps of the engine or once the running episodes have ended."""
        if not (self.policy.rollout.update_in_flight and self.rollout.updates_in_flight):
            self.loop.drain()
        assert self.channel is not None
        dtype = torch_dtype(self.policy.rollout.dtype)
        self.rollout.update_weights(self.channel.receive(manifest, dtype), manifest)
        self.rollout.set_version(version)

    @register(Dispatch.ONE_TO_ALL)
    def compare_canary(self, actor: Tensor | None) -> Metrics:
        """Compares what the policy and the engine make of the canaries; see `Canary.compare`."""
        return self.canary.compare(self.rollout, actor) if self.canary and actor is not None else {}

    def _score_canaries(self) -> Tensor | None:
        limits = self.policy.log_prob_micro_batching
        return (
            self.actor.compute_log_prob(self.canary.batch(), limits=limits)[0]
            if self.canary
            else None
        )

    def _canary(self) -> Canary | None:
        mute = "rollout" in self.role and type(self.rollout).score is BaseRollout.score
        if mute or self.config.max_model_len < 3:
            logger.warning(
                "rollout.name=%s scores nothing: no alarm watches the weight sync",
                self.policy.rollout.name,
            )
            return None
        render = partial(
            encode_chat, self.spec.tokenizer, **self.config.data.apply_chat_template_kwargs
        )
        return Canary(self.config.max_model_len, len(self.spec.tokenizer), render)

    @register(Dispatch.ONE_TO_ALL)
    def sleep_rollout(self) -> None:
        """Has the rollout engine give its memory to the trainer."""
        self.rollout.sleep()

    @register(Dispatch.RANK_ZERO)
    def ranks_per_engine(self) -> int:
        """Returns the size of a tensor-parallel group."""
        return self.policy.rollout.tensor_model_parallel_size

    @property
    def loop(self) -> TurnLoop:
        """Is what plays: the agents' turn loop, or that of prompts."""
        return self.agents.loop if self.agents is not None else self.prompt_loop

    @register(Dispatch.DP_COMPUTE_PROTO, ranks_per_chunk="ranks_per_engine", keeps_rows=False)
    def begin_batch(self, described: DataProto) -> None:
        """Takes a batch in, of prompts or episodes, which `play` goes on with; with meta_info `by_group` as many."""
        source = self.rollout if self.agents is None else self.agents
        self.loop.lockstep = bool(described.meta_info["seeded"])
        for part in [*by_group(described)] if described.meta_info.get("by_group") else [described]:
            batch = source.batch_of(part)
            batch.finish = partial(source.rows_of, part, batch.episodes)
            self.loop.add(batch)

    @register(Dispatch.ALL_TO_ALL)
    def play(self, seconds: float, to_idle: bool = False) -> list[DataProto]:
        """Goes on with all batches for so many seconds; returns those that have come to an end, as rows."""
        ended = self.loop.play(seconds, to_idle)
        return (
            [batch.finish() for batch in ended]
            if distributed.rank() % self.ranks_per_engine() == 0
            else []
        )

    @register(Dispatch.DP_COMPUTE_PROTO, ranks_per_chunk="ranks_per_engine")
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Answers every prompt; see `BaseRollout.generate_sequences`."""
        return self.rollout.generate_sequences(prompts)

    @register(Dispatch.ONE_TO_ALL)
    def start_agents(self, specs: list[AgentSpec]) -> None:
        """Opens an environment pool beside each engine, for episodes; one that was open is closed."""
        self.close_agents()
        group = distributed.rank_group(self.ranks_per_engine())
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
        """Computes `old_log_probs` and `entropys`, with meta_info `sum_pi_squared` that too: (B, response_len) each.

        The policy's own `values` come with them where it has any.
        """
        squares = data.meta_info.get("sum_pi_squared")
        limits, wanted = self.policy.log_prob_micro_batching, "squares" if squares else "value"
        with self._on_device():
            stats = self.actor.read(
                self._with_temperature(data), "compute_log_prob", limits, wanted
            )
        names = ["old_log_probs", "entropys", *(["sum_pi_squared"] if squares else []), "values"]
        return DataProto.from_dict(tensors=dict(zip(names, stats, strict=False)))

    @register(Dispatch.DP_COMPUTE_PROTO, reads=FORWARD_FIELDS, ranks_per_chunk="ranks_per_sequence")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Computes `ref_log_prob`, (B, response_len)."""
        module = self.ref.actor_module
        with (
            distributed.on_device(module, None, self.device, self.ref_fsdp),
            without_adapters(module),
        ):
            log_probs = self.ref.compute_log_prob(
                self._with_temperature(data), limits=self.policy.ref_micro_batching
            )
        return DataProto.from_dict(tensors={"ref_log_prob": log_probs[0]})

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=(*FORWARD_FIELDS, *UPDATE_FIELDS),
        ranks_per_chunk="ranks_per_sequence",
    )
    def update_actor(self, data: DataProto) -> dict[str, float]:
        """Calls `update_policy` once and makes one step of the schedule; returns metrics."""
        return self._update("actor", self.actor.update_policy, self._with_temperature(data))

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=(*CRITIC_FIELDS, *UPDATE_FIELDS),
        ranks_per_chunk="ranks_per_sequence",
    )
    def update_actor_and_values(self, data: DataProto) -> dict[str, float]:
        """Does what `update_actor` does, to a policy that has the values, whose fields it is sent too."""
        return self.update_actor(data)

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=(*FORWARD_FIELDS, *UPDATE_FIELDS),
        ranks_per_chunk="ranks_per_sequence",
    )
    def add_groups(self, data: DataProto) -> None:
        """Adds the gradient of groups of a step whose other groups may still play; see `Trained.add_groups`."""
        self.writer.wait_until_copied()
        with distributed.expandable_segments(self.device), self._on_device():
            self.actor.add_groups(self._with_temperature(data))

    @register(Dispatch.ONE_TO_ALL)
    def finish_update(self) -> Metrics:
        """Makes the step that `add_groups` has prepared, and one of the schedule; returns metrics."""
        return self._update(
            "actor", lambda data, plan: self.actor.finish_update("actor"), DataProto()
        )

    def _load_policy(
        self, fsdp: FSDPConfig, spec: ModelSpec, trainable: bool
    ) -> tuple[PolicyModel, ForwardSettings]:
        lm = spec.causal_lm(trainable=trainable)
        share = self.policy.actor.use_prefix_grouper
        settings = models.forward_settings(
            self.policy.model, share, lm, self.device, self.ranks_per_sequence()
        )
        if trainable:
            models.check_forward(lm)
        model = PolicyModel(
            PolicyValueModel(lm) if trainable and self.config.critic.share_backbone else lm
        )
        distributed.shard_model(model, fsdp, settings.dtype, self.device)
        return model, settings

    def _with_temperature(self, data: DataProto) -> DataProto:
        """Adds the temperature of sampling: log-probs are always those of the distribution that was sampled."""
        return replace(
            data, meta_info=data.meta_info | {"temperature": self.policy.rollout.temperature}
        )


class CriticWorker(TrainedWorker):
    """Holds the value model and its optimiser."""

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, total_training_steps: int, plan: BatchPlan) -> None:
        """Loads the model; the schedule runs over `total_training_steps` calls of `update_critic`."""
        distributed.start_worker(self.device, deterministic=self.config.trainer.deterministic)
        self.plan, cfg = plan.critic, self.config.resolved_critic
        module = ModelSpec(cfg.model, str(cfg.model.path), self.device).value_model()
        settings = models.forward_settings(
            cfg.model, cfg.use_prefix_grouper, module, self.device, self.ranks_per_sequence()
        )
        model = ValueModel(module)
        distributed.shard_model(model, cfg.fsdp_config, settings.dtype, self.device)
        self._make_trainable(model, module, cfg, total_training_steps)
        self.critic = DataParallelPPOCritic(cfg, model, self.optimizer, forward=settings)

    @register(Dispatch.DP_COMPUTE_PROTO, reads=FORWARD_FIELDS, ranks_per_chunk="ranks_per_sequence")
    def compute_values(self, data: DataProto) -> DataProto:
        """Computes `values`, (B, response_len)."""
        with self._on_device():
            return DataProto.from_dict(tensors={"values": self.critic.compute_values(data)})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=CRITIC_FIELDS, ranks_per_chunk="ranks_per_sequence")
    def update_critic(self, data: DataProto) -> dict[str, float]:
        """Calls `DataParallelPPOCritic.update_critic` once and makes one step of the schedule; returns metrics."""
        return self._update("critic", self.critic.update_critic, data)


def build_rollout(config: RolloutConfig, spec: ModelSpec) -> BaseRollout:
    """Builds the engine that `rollout.name` names; its package is imported only here."""
    if config.name == "vllm":
        from workers.vllm_rollout_spmd import vLLMRollout

        return vLLMRollout(config, spec)
    if config.name == "sglang":
        from workers.sglang_rollout import SGLangRollout

        return SGLangRollout(config, spec)
    from workers.hf_rollout import HFRollout

    return HFRollout(config, spec)


READS = ("prompts", "responses", "response_mask", "attention_mask", "raw_prompt")


class RewardModelWorker:
    """Holds the reward model of one rank."""

    def __init__(self, config: PPOConfig) -> None:
        self.config = config.reward_model
        self.deterministic = config.trainer.deterministic
        self.device = find_device(config.trainer.device)

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model; several ranks share its weights."""
        start_worker(self.device, deterministic=self.deterministic)
        model = self.config.model
        spec = ModelSpec(model, str(model.path), self.device)
        self.module, self.dtype = spec.reward_model(), torch_dtype(model.dtype)
        shard_model(self.module, FSDPConfig(), self.dtype, self.device)
        self.tokenizer = spec.tokenizer
        given = model.input_tokenizer
        self.input_tokenizer = None if given is None else AutoTokenizer.from_pretrained(given)

    @register(Dispatch.DP_COMPUTE_PROTO, reads=READS)
    @torch.no_grad()
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Scores every row: `rm_scores` (B, response_len) float32, each on the row's last sampled token."""
        rows = self._own_rows(data) if self.input_tokenizer is None else self._retold_rows(data)
        rows = [ids[-(self.config.max_length or len(ids)) :] for ids in rows]
        size = self.config.micro_batch_size_per_gpu
        scores = [self._score(rows[start : start + size]) for start in range(0, len(rows), size)]
        placed = place_outcome_rewards(torch.cat(scores), data.batch["response_mask"])
        return DataProto.from_dict(tensors={"rm_scores": placed})

    def _own_rows(self, data: DataProto) -> list[Tensor]:
        """Returns each row's tokens as the policy has them."""
        ids = torch.cat([data.batch["prompts"], data.batch["responses"]], dim=1).long()
        return [
            row[kept] for row, kept in zip(ids, data.batch["attention_mask"].bool(), strict=True)
        ]

    def _retold_rows(self, data: DataProto) -> list[Tensor]:
        """Renders each row's messages and response in the model's own chat template."""
        data.require(
            "raw_prompt",
            by="reward_model.model.input_tokenizer (data.return_raw_chat=true keeps it)",
        )
        assert self.input_tokenizer is not None
        answers = decode_sampled(self.input_tokenizer, data.batch)
        pairs = zip(map(list, data.non_tensor_batch["raw_prompt"]), answers, strict=True)
        told = (
            [*as_messages(asked), {"role": "assistant", "content": answer}]
            for asked, answer in pairs
        )
        rows = (
            encode_chat(self.tokenizer, messages, add_generation_prompt=False) for messages in told
        )
        return [torch.tensor(row) for row in rows]

    def _score(self, rows: list[Tensor]) -> Tensor:
        """Reads what the model says of each row's last token: (rows,) float32 on the CPU."""
        lengths = torch.tensor([len(row) for row in rows])
        ids = pad_sequence(rows, batch_first=True, padding_value=pad_token_id(self.tokenizer)).to(
            self.device
        )
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long().to(self.device)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = self.module(input_ids=ids, attention_mask=mask, use_cache=False).logits[..., 0]
        return logits.float().cpu().gather(1, lengths[:, None] - 1)[:, 0]
