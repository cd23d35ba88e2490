"""Plans a run's memory before it starts: what each rank holds in each phase of a step, without loading a model.

Models are built without numbers (fake tensors), and the run's own code, its layout of rows, forward, loss and backward,
goes once over the largest micro-batch of full rows, while a tracker adds up the bytes that live: so the plan follows
the code. What that cannot show is computed: what FSDP2 gathers, engines' caches, buffers of weight sync, checkpoints.

Invariant: nothing of the size of a weight is allocated. On CUDA attention counts as its kernels hold it, on a CPU as
blocks of segments do. What allocators keep beyond, and CUDA itself (about 1 GiB), comes on top.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import psutil
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from data.protocol import DataProto
from data.texts import table
from training.config import FSDPConfig, MicroBatching, PPOConfig
from training.config.leaves import build
from workers.dp_actor import DataParallelPPOActor, DataParallelPPOCritic
from workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker
from workers.model.builder import ModelSpec, torch_dtype
from workers.model.micro_batches import iter_micro_batches
from workers.model.update_loop import UpdateLoop
from workers.vllm_rollout_spmd import kv_cache_bytes

GIB = 1 << 30
# The phases of a step in order, what takes memory, and with it what to change where it is too much.
TABLE: dict[str, Any] = table(__file__)
# Bytes, by what takes them.
Terms = Counter[str]
# How a phase's rows are cut, into mini-batches and then on a rank, and what its module is asked for; by its name.
Passes = dict[str, tuple[int, MicroBatching, *tuple[str, ...]]]


class Live(TorchDispatchMode):
    """Adds up the bytes of what is made in its block, as long as they live: logits, and what else there is.

    Attributes:
        now, peak: what lives, and the most that did at once; a module's weights and gradients do not count.
        vocabulary: its size tells logits by their shape.
    """

    def __init__(self, module: nn.Module, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.now, self.peak = vocabulary, Terms(), Terms()
        own = [
            *module.parameters(),
            *module.buffers(),
            *(p.grad for p in module.parameters() if p.grad is not None),
        ]
        self.known = {tensor.untyped_storage()._cdata for tensor in own}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and counts what it makes."""
        made = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._see, made)
        self.peak = max(self.peak, self.now.copy(), key=Terms.total)
        return made

    def _see(self, tensor: Tensor) -> None:
        storage, logits = (
            tensor.untyped_storage(),
            tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary,
        )
        if (key := storage._cdata) not in self.known:
            self.known.add(key)
            self.now[what := "logits" if logits else "activations"] += storage.nbytes()
            weakref.finalize(storage, self._forget, key, what, storage.nbytes())

    def _forget(self, key: int, what: str, size: int) -> None:
        self.known.discard(key)
        self.now[what] -= size


class Planner:
    """Plans the memory of one of a config's ranks, which are all alike but for engines with ranks of their own."""

    def __init__(self, config: PPOConfig) -> None:
        trainer, model, self.data = config.trainer, config.actor_rollout_ref.model, config.data
        self.cuda = (trainer.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda"
        self.config, self.rollout = build(config, TABLE["planned_with"]), config.resolved_rollout
        self.plan, self.ranks, self.apart = (
            config.batch_plan,
            trainer.num_ranks,
            trainer.rollout_n_gpus,
        )
        self.spec = ModelSpec(model, str(model.path), torch.device("cpu"))
        self.shape, self.mode = (
            self.spec.hf_config.get_text_config(),
            FakeTensorMode(allow_non_fake_inputs=True),
        )
        # Fake tensors cannot be moved.
        with self.mode, patch.object(nn.Module, "to", lambda module, *_, **__: module):
            self.engine = self.spec.empty_causal_lm(torch_dtype(self.rollout.dtype)).eval()
            models = [*self._models()]
        # Each model's bytes at rest, and in its phases.
        self.parts = [self._part(*model) for model in models]

    def _models(self) -> Iterator[tuple[UpdateLoop, FSDPConfig, Passes]]:
        """Builds the models of a rank, as the workers do; says what passes over them there are."""
        config, policy, plan = self.config, self.config.actor_rollout_ref, self.plan
        reference = replace(self.spec, path=policy.ref.model.path or self.spec.path)
        passes: Passes = {"log-probs": (1, policy.log_prob_micro_batching, "value")}
        passes["actor update"] = (plan.actor.mini_batches, policy.actor.micro_batching)
        scores: Passes = {"reference": (1, policy.ref_micro_batching, "none")}
        models = [(policy.actor, self.spec, passes), (policy.ref, reference, scores)]
        # The actor's model, with LoRA, is the reference too.
        apart = config.need_reference and not (policy.model.lora_rank and reference == self.spec)
        for own, spec, passes in models if apart else models[:1]:
            loaded = ActorRolloutRefWorker(config, "actor")._load_policy(
                own.fsdp_config, spec, own is policy.actor
            )
            worker = DataParallelPPOActor(
                policy.actor, loaded[0], forward=loaded[1], critic=config.critic
            )
            yield worker, own.fsdp_config, passes
        if config.need_critic:
            critic = CriticWorker(config)
            critic.init_model(1, plan)
            limits, parts = critic.own.micro_batching, plan.critic.mini_batches
            yield (
                critic.critic,
                critic.own.fsdp_config,
                {"values": (1, limits), "critic update": (parts, limits)},
            )
        if (scorer := config.reward_model).enable:
            model = ModelSpec(scorer.model, str(scorer.model.path), self.spec.device).reward_model()
            yield DataParallelPPOCritic(config.critic, model), FSDPConfig(), {}

    def _part(
        self, worker: UpdateLoop, fsdp: FSDPConfig, passes: Passes
    ) -> tuple[Terms, dict[str, Terms]]:
        """Plans a model at rest and in its passes, for which FSDP2 gathers outer weights, two blocks, and gradients."""
        parameters, dtype = [*worker.module.parameters()], worker.settings.dtype
        whole, trained = (
            sum(p.numel() for p in parameters if p.requires_grad >= only) for only in (False, True)
        )
        weights, moments = (
            sum(p.nbytes for p in parameters) // self.ranks,
            8 * trained // self.ranks,
        )
        used = Terms(
            weights=weights, optimiser=0 if self.cuda and fsdp.optimizer_offload else moments
        )
        rest = used - Terms(weights=weights if self.cuda and fsdp.param_offload else 0)
        phases = {"generation": Terms() if self.apart else rest}
        phases["checkpoint"] = rest + Terms(copies=0 if self.cuda else moments * 3 // 2)
        outer = sum(p.numel() for p in parameters if self.shape.vocab_size in p.shape)
        block = (whole - outer) // self.shape.num_hidden_layers
        forward = outer + 2 * block if fsdp.reshard_after_forward else whole
        for parameter in parameters if self.ranks > 1 else ():
            parameter.data = parameter.data.to(dtype)
        for name, how in passes.items():
            update = name.endswith("update")
            gathered = dtype.itemsize * (forward + (outer + 3 * block) * trained // whole * update)
            phases[name] = self._pass(worker, update, *how) + Terms(
                copies=gathered if self.ranks > 1 else 0
            )
            phases[name] += used | Terms(optimiser=moments if update else 0)
        if "log-probs" in phases:
            # For what is sent, and for the canaries then, weights are gathered or cast.
            phases["weight sync"] = used + Terms(
                copies=phases["log-probs"]["copies"] or 2 * max(trained, outer)
            )
        return rest, phases

    def _pass(
        self, worker: UpdateLoop, update: bool, parts: int, limits: MicroBatching, *how: str
    ) -> Terms:
        """Runs the largest micro-batch of full rows forward, and backward in an update; returns its peak."""
        module, width, length = (
            worker.module,
            self.data.max_prompt_length,
            self.data.max_response_length,
        )
        most = limits.micro_batch_size or (limits.max_token_len or 0) // length + 1
        count = min(self.plan.prompts * self.rollout.n // self.plan.ranks // parts, 2 * most)
        # Groups share a prompt.
        rows, ones = torch.arange(count)[:, None], torch.ones(count, width + length)
        tensors = dict.fromkeys(TABLE["fields"], ones[:, width:]) | {"attention_mask": ones}
        tensors |= {
            "prompts": (rows // self.rollout.n).expand(count, width),
            "responses": rows.expand(count, length),
        }
        micros = [
            *iter_micro_batches(DataProto.from_dict(tensors=tensors), worker.settings, limits)
        ]
        _, micro, inputs = micros[0]
        if self.cuda and inputs.sequences is not None:
            inputs = replace(
                inputs, sequences=None, position_ids=torch.arange(inputs.input_ids.shape[1])[None]
            )
        trained = [p for p in module.parameters() if p.requires_grad and update]
        # Of several micro-batches the later ones find gradients; FSDP2 takes away what a block has.
        there = len(micros) > 1 or self.ranks > 1
        for parameter in trained if there else ():
            parameter.grad = torch.empty_like(parameter)
        counts: Any = {"dp_size": 1, "batch_num_tokens": 1, "global_batch_size": 1}
        with (
            self.mode,
            Live(module.train(update), self.shape.vocab_size) as live,
            torch.set_grad_enabled(update),
        ):
            if update:
                worker.micro_loss(micro, inputs, counts).loss.backward()
            else:
                worker.micro_forward(micro, inputs, *how)
        found = Terms(
            {what: size * self.plan.ranks // self.ranks for what, size in live.peak.items()}
        )
        gradients = 4 * sum(p.numel() for p in trained) // self.ranks
        return found + Terms(gradients=gradients) - Terms(activations=0 if there else gradients)

    def _generation(self) -> Terms:
        """Runs the hf engine's first step on a batch of full rows; the last has the whole cache, and logits' copies."""
        rows, most = (
            self.plan.prompts * self.rollout.n // (self.apart or self.ranks),
            self.rollout.max_num_seqs,
        )
        ids = torch.zeros(rows := min(rows, most), self.data.max_prompt_length, dtype=torch.long)
        cache = rows * kv_cache_bytes(
            self.spec, replace(self.rollout, max_num_seqs=1), self.data.row_length, block=1
        )
        with self.mode, Live(self.engine, 0) as live, torch.no_grad():
            self.engine(input_ids=ids, use_cache=False, logits_to_keep=1)
        first = live.peak.total() - cache * self.data.max_response_length // self.data.row_length
        return Terms(
            {"KV cache": cache, "activations": max(first, 26 * rows * self.shape.vocab_size)}
        )

    def _engine(self, capacity: int) -> tuple[Terms, dict[str, Terms]]:
        """Plans the engine, at rest and in its phases: on CUDA vLLM takes its part of the device, or sleeps."""
        size = (
            sum(p.nbytes for p in self.engine.parameters())
            // self.rollout.tensor_model_parallel_size
        )
        weights, cache = (
            Terms(weights=size),
            int(self.rollout.gpu_memory_utilization * capacity) - size,
        )
        if not self.cuda:
            cache = kv_cache_bytes(self.spec, self.rollout, self.config.max_model_len)
        plays, hf = weights + Terms({"KV cache": cache}), self.rollout.name == "hf"
        rest = weights if hf else Terms() if self.cuda and self.rollout.free_cache_engine else plays
        phases = {
            "generation": weights + self._generation() if hf else plays,
            "weight sync": rest | weights,
        }
        return (Terms(), {"generation": phases["generation"]}) if self.apart else (rest, phases)

    def phases(self, capacity: int) -> dict[str, Terms]:
        """Adds up a rank's bytes in each phase that the run has, on a device with so many.

        Where engines have ranks of their own generation is on those, and all else on the others.
        """
        parts = [*self.parts, self._engine(capacity)]
        names = [name for name in TABLE["order"] if any(name in own for _, own in parts)]
        return {name: sum((own.get(name, rest) for rest, own in parts), Terms()) for name in names}

    def tell(self) -> str:
        """Writes the table, whether it fits, and what to change where it does not."""
        trainer, advice = self.config.trainer, TABLE["advice"]
        memory = psutil.virtual_memory().total * trainer.nnodes // trainer.all_ranks // GIB
        tables = {
            size: self.phases(size * GIB) for size in (TABLE["cards"] if self.cuda else [memory])
        }
        largest = {
            size: max(phases.values(), key=Terms.total).total() for size, phases in tables.items()
        }
        fits = [
            size
            for size in tables
            if largest[size] <= size * GIB and tables[size]["generation"]["KV cache"] > 0
        ]
        phases = tables[size := min(fits, default=max(tables))]
        most = max(phases, key=lambda name: phases[name].total())
        cells = {
            name: (*(own[what] / GIB for what in advice), own.total() / GIB)
            for name, own in phases.items()
        }
        lines = [f"{self.spec.path}: GiB on each of {self.ranks} rank(s), of {size} GiB", " " * 13]
        lines[1] += "".join(f"{what:>12}" for what in (*advice, "total"))
        lines += [
            f"{name:<13}" + "".join(f"{cell:12.2f}" for cell in row) for name, row in cells.items()
        ]
        told = ", ".join(f"{size} GiB: {'yes' if size in fits else 'NO'}" for size in tables)
        lines.append(f"largest: {most}, {phases[most].total() / GIB:.2f} GiB; does it fit? {told}")
        if "NO" in told:
            term = max(advice, key=lambda name: phases[most][name])
            lines.append(f"{most} takes most for {term}; less with {advice[term]}")
        return "\n".join(lines)
