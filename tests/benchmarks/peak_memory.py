"""Peak memory of a GRPO run on SmolLM2-135M against the sum of what must be held at once.

Both are above the memory of the imports.

Run with nothing else on the machine: python -m tests.benchmarks.peak_memory [STEPS]
"""

from __future__ import annotations

import sys
import threading
import time
from itertools import islice

import torch
from torch.autograd.graph import saved_tensors_hooks

MIB = 1 << 20


def resident() -> float:
    """This process's resident memory now, in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / MIB


class PeakWatcher(threading.Thread):
    """Samples the resident memory every 5 ms; keeps the peak of each phase, named by the caller."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.phase, self.peaks = "start", {}

    def run(self) -> None:
        while True:
            self.peaks[self.phase] = max(self.peaks.get(self.phase, 0.0), resident())
            time.sleep(0.005)


def activation_bytes(worker, batch) -> int:
    """Returns what autograd keeps of the largest micro-batch, each storage once, no parameters."""
    from workers.model.micro_batches import iter_micro_batches

    actor = worker.actor
    parameters = {p.untyped_storage().data_ptr() for p in worker.module.parameters()}
    largest = 0
    for _, micro, trees in iter_micro_batches(batch, actor.settings, actor.config.micro_batching):
        seen: dict[int, int] = {}

        def pack(tensor: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            log_probs, _ = actor.micro_forward(micro, trees, "value")
        largest = max(largest, sum(seen.values()))
        del log_probs
    return largest


def main(steps: int) -> None:
    # What the engine, the model class and the reward import when they are first used counts as
    # imports.
    import reasoning_gym  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401
    from vllm import LLMEngine  # noqa: F401

    import workers.fsdp_workers
    import workers.vllm_rollout_spmd  # noqa: F401
    from training.building import build_trainer
    from training.config.loader import load_config

    overrides = ["data.max_response_length=64", "data.val_files=null", "trainer.logger=file"]
    config = load_config(
        [
            "configs/smollm2_arithmetic.yaml",
            *overrides,
            "trainer.default_local_dir=outputs/benchmark",
        ]
    ).config
    trainer = build_trainer(config)
    baseline = resident()
    watcher = PeakWatcher()
    watcher.start()
    trainer.init_workers()
    batches = []
    trainer.on_batch = batches.append  # type: ignore[method-assign]
    for number, rows in enumerate(islice(trainer.training_batches(), steps)):
        watcher.phase = f"step {number + 1}"
        trainer.train_step(rows)
    watcher.phase = "measuring"
    worker = trainer.actor_rollout_wg.worker
    count = sum(p.numel() for p in worker.module.parameters())
    kv = worker.rollout.engine.vllm_config.cache_config.kv_cache_memory_bytes
    head = worker.module.get_output_embeddings().weight.numel()
    batches[-1].meta_info["temperature"] = 1.0
    parts = {
        "weights, float32": 4 * count,
        "gradients, float32": 4 * count,
        "AdamW, 2 x float32": 8 * count,
        "activations of one micro-batch": max(activation_bytes(worker, batch) for batch in batches),
        "engine weights, bfloat16": 2 * count,
        "engine's packed lm_head": 2 * head,
        "engine KV cache": kv,
    }
    total = sum(parts.values()) / MIB
    print(f"\n{count / 1e6:.1f}M parameters; imports {baseline:.0f} MiB")
    for name, value in parts.items():
        print(f"  {name:32s} {value / MIB:8.0f} MiB")
    print(f"  {'computed sum':32s} {total:8.0f} MiB")
    for phase, peak in watcher.peaks.items():
        if phase != "measuring":
            print(f"  peak in {phase:24s} {peak - baseline:8.0f} MiB above imports")
    peak = max(peak for phase, peak in watcher.peaks.items() if phase != "measuring") - baseline
    print(f"  peak / computed {peak / total:.3f}   (at most 1.15)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
