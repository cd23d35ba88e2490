"""The workers: what a rank holds of policy, reference and engine, and what it receives and sends.

The critic's stands in critic_worker.py, the reward model's in reward_model_worker.py. Each composes
models, their optimisers, a rollout engine and checkpoints into the calls of its roles. A registered
method takes and returns a DataProto or plain values, so that a worker can live in the driver's
process or elsewhere; `reads` names the fields that it is sent, which for updates follow from
workers/model/loss_fields.py. Invariant: the config never changes here; how a batch is cut for
updates follows from it (`BatchPlan`).
"""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, Literal

from torch import Tensor

from custom.agent import AgentSpec
from data.protocol import DataProto
from training.config import ActorRolloutRefConfig, BatchPlan, FSDPConfig, PPOConfig
from workers.agent_rollout import AgentRollout
from workers.critic_worker import CriticWorker as CriticWorker
from workers.dp_actor import DataParallelPPOActor
from workers.model import state as model_state
from workers.model.banned_tokens import banned_token_ids
from workers.model.builder import ModelSpec, require_same_vocabulary, torch_dtype
from workers.model.companion import ASKED, open_companions
from workers.model.forward_settings import ForwardSettings, forward_settings
from workers.model.further_rows import open_further_rows
from workers.model.lora import adapter_export, without_adapters
from workers.model.loss_fields import (
    FORWARD_FIELDS,
    POLICY_AND_VALUE_UPDATE_FIELDS,
    POLICY_FORWARD_FIELDS,
    POLICY_UPDATE_FIELDS,
)
from workers.model.loss_terms import open_loss_terms
from workers.model.packing_check import check_forward, check_training
from workers.model.policy_model import PolicyModel, PolicyValueModel
from workers.model.probe_set import ReadProbes, SyncProbes
from workers.model.probes_of_run import open_read_probes, open_sync_probes
from workers.model.router_replay import check_routers, open_routers
from workers.ranks import memory, offload, process_groups, sharding, worker_process
from workers.ranks.dispatch import Dispatch, register
from workers.reward_model_worker import RewardModelWorker as RewardModelWorker
from workers.rollout.engine_check import check_engine
from workers.rollout.episode_descriptions import by_group
from workers.rollout.turn_loop import TurnLoop
from workers.rollout_building import build_rollout as build_rollout
from workers.training_worker import Metrics, TrainingWorker
from workers.weight_sync import channel
from workers.weight_sync.manifest import Manifest, iter_weights, weight_manifest

Role = Literal["actor", "rollout", "ref", "actor_rollout", "actor_rollout_ref"]


class ActorRolloutRefWorker(TrainingWorker):
    """Holds the policy as `role` says: trained, sampled from, and frozen as the reference.

    Attributes:
        actor_class: what reads and updates the policy; a subclass that learns otherwise names its.
    """

    actor_class: ClassVar[type[DataParallelPPOActor]] = DataParallelPPOActor

    def __init__(self, config: PPOConfig, role: Role) -> None:
        super().__init__(config)
        self.policy: ActorRolloutRefConfig = config.actor_rollout_ref
        self.role = role
        self.agents: AgentRollout | None = None
        self.channel: channel.WeightChannel | None = None
        self.sync_probes = SyncProbes()

    # --- Building ---

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, total_training_steps: int, plan: BatchPlan) -> None:
        """Loads what the role needs.

        The schedule runs over `total_training_steps` calls of `update_actor`.
        """
        worker_process.start_worker(self.device, deterministic=self.config.trainer.deterministic)
        self.plan = plan.actor
        self.spec = ModelSpec(self.policy.model, str(self.policy.model.path), self.device)
        if "actor" in self.role:
            self._init_actor(total_training_steps)
            self.actor.further_rows = open_further_rows(self.config, self.spec)
        if "ref" in self.role:
            self._init_reference()
        # Last, as the engine sizes its cache by what is left free.
        engine = None
        if "rollout" in self.role:
            self._init_rollout()
            engine = self.rollout
        self.sync_probes = SyncProbes(open_sync_probes(self.config, self.spec, engine))
        if self.role.startswith("actor_rollout"):
            self.rollout.sleep()
            self.sync_weights()
            if self.rollout.is_tried:
                self._try_rollout()

    def _init_actor(self, total_training_steps: int) -> None:
        section = self.policy.actor
        model, settings = self.load_policy(section.fsdp_config, self.spec, trainable=True)
        self._make_trainable(model, model.trained, section, total_training_steps, role="actor")
        self.tokenizer = self.spec.tokenizer
        # Before the first step, and not hours later.
        if process_groups.rank() == 0:
            model_state.try_settings(model.trained, self.tokenizer)
        self.actor = self.actor_class(
            section,
            model,
            self.optimizer,
            correction=self.config.algorithm.rollout_correction,
            observation_loss_coef=self.config.agent.observation_loss_coef,
            forward=settings,
            critic=self.config.critic,
            probes=self.probes,
            terms=open_loss_terms(self.config),
        )
        self.companions = open_companions(self.config, self)
        for companion in self.companions.values():
            companion.begin()

    def _init_reference(self) -> None:
        spec = replace(self.spec, path=self.policy.ref.model.path or self.spec.path)
        if spec != self.spec:
            require_same_vocabulary(self.spec, spec)
        # The actor's model, with LoRA, is the reference without its adapters.
        has_adapters = "actor" in self.role and self.policy.model.lora_rank > 0
        if has_adapters and spec == self.spec:
            self.ref_fsdp = self.policy.actor.fsdp_config
            model = self.actor.actor_module
            settings = self.actor.settings
        else:
            self.ref_fsdp = self.policy.ref.fsdp_config
            model, settings = self.load_policy(self.ref_fsdp, spec, trainable=False)
        self.ref = DataParallelPPOActor(self.policy.actor, model, forward=settings)
        self.ref_probes = ReadProbes(open_read_probes(self.config, "ref"))
        self.ref_probes.read(self.ref.module)
        offload.offload(model, None, self.ref_fsdp)

    def _init_rollout(self) -> None:
        self.rollout = build_rollout(self.config.resolved_rollout, self.spec)
        group = process_groups.rank_group(self.ranks_per_engine())
        self.prompt_loop = TurnLoop(self.rollout, group=group)
        self.rollout.records_versions = self.config.trainer.async_level > 0

    def _try_rollout(self) -> None:
        """Compares the engine's log-probs of what it samples with the policy's; see `check_engine`.

        Raises:
            ValueError: they differ.
        """
        limits = self.policy.log_prob_micro_batching

        def log_probs_of(data: DataProto) -> Tensor:
            with self._on_device():
                return self.actor.compute_log_prob(data, limits=limits)[0]

        known = self.spec.hf_config.get_text_config().vocab_size
        check_engine(
            self.rollout,
            log_probs_of,
            vocabulary=min(known, len(self.spec.tokenizer)),
            kind=self.spec.hf_config.model_type,
            exact=self.policy.model.dtype == self.policy.rollout.dtype == "float32",
        )

    def load_policy(
        self, fsdp: FSDPConfig, spec: ModelSpec, trainable: bool
    ) -> tuple[PolicyModel, ForwardSettings]:
        """Loads and shards a policy; returns it and how it is run."""
        lm = spec.causal_lm(trainable=trainable)
        settings = forward_settings(
            self.policy.model,
            self.policy.actor.use_prefix_grouper,
            lm,
            self.device,
            ranks=self.ranks_per_sequence(),
            role="actor" if trainable else "reference",
        )
        if trainable:
            check_forward(lm)
            check_training(lm)
        if trainable and self.config.replays_routing:
            open_routers(lm)
            check_routers(lm)
        if trainable and self.config.critic.share_backbone:
            lm = PolicyValueModel(lm)
        # A teacher of another folder leaves out the ids that the policy leaves out.
        policy = replace(spec, path=str(self.policy.model.path))
        model = PolicyModel(lm, banned_token_ids(self.policy.rollout, policy))
        sharding.shard_model(model, fsdp, settings.dtype, self.device)
        return model, settings

    # --- The engine's weights ---

    @register(Dispatch.ONE_TO_ALL)
    def sync_weights(self, version: int = 0) -> dict[str, float]:
        """Sends the policy's weights to the engine, which wakes up; returns probes' metrics.

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
                weights = iter_weights(lm, dtype, casts=not self.rollout.casts_weights)
                self.rollout.update_weights(weights, weight_manifest(lm))
            seen = self.sync_probes.weights_sent(self.actor)
        self.rollout.wake_up("kv_cache")
        self.rollout.set_version(version)
        return self.probe_weights(seen)

    @register(Dispatch.RANK_ZERO)
    def open_weight_channel(self) -> tuple[str, int]:
        """Opens the store at which the policy's first rank and engines on other ranks meet."""
        host = os.environ["MASTER_ADDR"]
        self.store, port = process_groups.open_store(host)
        return host, port

    @register(Dispatch.ONE_TO_ALL)
    def join_weight_channel(self, address: tuple[str, int], size: int) -> Manifest | None:
        """Makes the channel of weights, whose first rank is the policy's; the others have none.

        Returns: names and shapes of what the policy sends; None on engines.
        """
        self.channel = None
        if "actor" not in self.role:
            number = process_groups.rank() + 1
            self.channel = channel.WeightChannel(address, number, size, self.device)
            return None
        if process_groups.rank() == 0:
            self.channel = channel.WeightChannel(address, 0, size, self.device)
        return weight_manifest(self.actor.actor_module.lm)

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(self) -> dict[str, Tensor]:
        """Sends the policy's weights over the channel; returns what probes saw of it, by probe."""
        dtype = torch_dtype(self.policy.rollout.dtype)
        with self._on_device():
            for _, tensor in iter_weights(self.actor.actor_module.lm, dtype):
                if self.channel is not None:
                    self.channel.broadcast(tensor.contiguous())
            return self.sync_probes.weights_sent(self.actor)

    @register(Dispatch.ONE_TO_ALL)
    def receive_weights(self, manifest: Manifest, version: int) -> None:
        """Takes weights from the channel.

        It does so between two steps of the engine, or once the running episodes have ended.
        """
        if not (self.policy.rollout.update_in_flight and self.rollout.updates_in_flight):
            self.loop.drain()
        assert self.channel is not None
        dtype = torch_dtype(self.policy.rollout.dtype)
        self.rollout.update_weights(self.channel.receive(manifest, dtype), manifest)
        self.rollout.set_version(version)

    @register(Dispatch.ONE_TO_ALL)
    def probe_weights(self, seen: dict[str, Tensor]) -> Metrics:
        """Compares what probes see of the engine with what they saw of the policy, by probe."""
        return self.sync_probes.weights_taken(self.rollout, seen)

    # --- Rollout ---

    @register(Dispatch.ONE_TO_ALL)
    def sleep_rollout(self) -> None:
        """Makes the rollout engine give its memory to the trainer."""
        self.rollout.sleep()

    @register(Dispatch.RANK_ZERO)
    def ranks_per_engine(self) -> int:
        """Returns the size of a tensor-parallel group."""
        return self.policy.rollout.tensor_model_parallel_size

    @property
    def loop(self) -> TurnLoop:
        """Returns what plays: the agents' turn loop, or that of prompts."""
        if self.agents is None:
            return self.prompt_loop
        return self.agents.loop

    @register(Dispatch.DP_COMPUTE_PROTO, ranks_per_chunk="ranks_per_engine", keeps_rows=False)
    def begin_batch(self, described: DataProto) -> None:
        """Takes in a batch of prompts or episodes, which `play` goes on with.

        With meta_info `by_group` each group is a batch.
        """
        source = self.rollout if self.agents is None else self.agents
        self.loop.lockstep = bool(described.meta_info["seeded"])
        parts = [described]
        if described.meta_info.get("by_group"):
            parts = list(by_group(described))
        for part in parts:
            batch = source.batch_of(part)
            batch.finish = partial(source.rows_of, part, batch.episodes)
            self.loop.add(batch)

    @register(Dispatch.ALL_TO_ALL)
    def play(self, seconds: float, to_idle: bool = False) -> list[DataProto]:
        """Goes on with all batches for so many seconds; returns those that have ended, as rows."""
        ended = self.loop.play(seconds, to_idle)
        is_leader = process_groups.rank() % self.ranks_per_engine() == 0
        if not is_leader:
            return []
        return [batch.finish() for batch in ended]

    @register(Dispatch.DP_COMPUTE_PROTO, ranks_per_chunk="ranks_per_engine")
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Answers every prompt; see `BaseRollout.generate_sequences`."""
        return self.rollout.generate_sequences(prompts)

    @register(Dispatch.ONE_TO_ALL)
    def start_agents(self, specs: list[AgentSpec]) -> None:
        """Opens an environment pool beside each engine; one that was open is closed."""
        self.close_agents()
        group = process_groups.rank_group(self.ranks_per_engine())
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

    # --- Log-probs ---

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=POLICY_FORWARD_FIELDS,
        ranks_per_chunk="ranks_per_sequence",
    )
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Computes `old_log_probs` and `entropys`, (B, response_len) each.

        With meta_info `sum_pi_squared` that comes with them, and the policy's `values` where it has
        any.
        """
        names = ["old_log_probs", "entropys"]
        entropy_mode = "value"
        if data.meta_info.get("sum_pi_squared"):
            names.append("sum_pi_squared")
            entropy_mode = "squares"
        if self.actor.actor_module.value_head is not None:
            names.append("values")
        with self._on_device():
            columns = self.actor.read(
                self._with_temperature(data),
                "compute_log_prob",
                self.policy.log_prob_micro_batching,
                entropy_mode,
            )
        return DataProto.from_dict(tensors=dict(zip(names, columns, strict=True)))

    @register(Dispatch.DP_COMPUTE_PROTO, reads=FORWARD_FIELDS, ranks_per_chunk="ranks_per_sequence")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Computes `ref_log_prob`, (B, response_len).

        meta_info has what probes measured of the reference, by metric.
        """
        module = self.ref.actor_module
        with (
            offload.on_device(module, None, self.device, self.ref_fsdp),
            without_adapters(module),
        ):
            log_probs, _ = self.ref.compute_log_prob(
                self._with_temperature(data), limits=self.policy.ref_micro_batching
            )
            measured = self.ref_probes.read(self.ref.module)
        return DataProto.from_dict(tensors={"ref_log_prob": log_probs}, meta_info=dict(measured))

    @register(Dispatch.DP_COMPUTE_PROTO, ranks_per_chunk="ranks_per_sequence")
    def ask_companion(self, data: DataProto) -> DataProto:
        """Asks the companion that meta_info names about rows."""
        companion = self.companions[data.meta_info[ASKED]]
        with self._on_device():
            return companion.read(self._with_temperature(data))

    def _with_temperature(self, data: DataProto) -> DataProto:
        """Adds the temperature of sampling.

        Log-probs are always those of the distribution that was sampled.
        """
        temperature = self.policy.rollout.temperature
        return replace(data, meta_info=data.meta_info | {"temperature": temperature})

    # --- Updates ---

    @register(Dispatch.RANK_ZERO)
    def further_fields(self) -> tuple[str, ...]:
        """Lists the fields that updates need beside those that losses read.

        They are those of probes and of the loss's terms.
        """
        return (*super().further_fields(), *self.actor.terms.fields())

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=POLICY_UPDATE_FIELDS,
        further_reads="further_fields",
        ranks_per_chunk="ranks_per_sequence",
    )
    def update_actor(self, data: DataProto) -> dict[str, float]:
        """Calls `update_policy` once and makes one step of the schedule; returns metrics."""
        rows = self._with_temperature(data)
        return self._update("actor", partial(self.actor.update_policy, rows, self.plan))

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=POLICY_AND_VALUE_UPDATE_FIELDS,
        further_reads="further_fields",
        ranks_per_chunk="ranks_per_sequence",
    )
    def update_actor_and_values(self, data: DataProto) -> dict[str, float]:
        """Calls `update_actor` for a policy that has the values, whose fields it is sent too."""
        return self.update_actor(data)

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=POLICY_UPDATE_FIELDS,
        further_reads="further_fields",
        ranks_per_chunk="ranks_per_sequence",
    )
    def add_groups(self, data: DataProto) -> None:
        """Adds the gradient of groups of a step whose others may still play.

        See `UpdateLoop.add_groups`.
        """
        self.writer.wait_until_copied()
        with memory.expandable_segments(self.device), self._on_device():
            self.actor.add_groups(self._with_temperature(data))

    @register(Dispatch.ONE_TO_ALL)
    def finish_update(self) -> Metrics:
        """Makes the step that `add_groups` prepared, and one of the schedule; returns metrics."""
        return self._update("actor", self.actor.finish_update)
