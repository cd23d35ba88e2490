"""`sync_weights` of the trainer's worker into vLLM, against the engine's bare `reload_weights`.

The latter gets tensors that lie ready in the engine's dtype.

    ours   manifest check, each float32 tensor cast to the engine's dtype as it is asked for,
           reload, cache reset
    bare   reload of the same tensors, cast beforehand

Run with nothing else on the machine: python -m tests.benchmarks.weight_sync [--rounds 9]
[--billion]; the latter takes a Llama of 1.1 billion random weights, which the trainer holds in
float32.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.prepare_tiny_prompts import make_tokenizer
from tests.benchmarks.peak_memory import MIB, PeakWatcher, resident
from tests.benchmarks.ray_vs_local import task
from training.building import build_trainer
from training.config.loader import load_config
from workers.model.builder import torch_dtype
from workers.weight_sync.manifest import iter_weights

TIME_TARGET, MEMORY_TARGET = 1.5, 1.0


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def extra_memory(call: Callable[[], object], watcher: PeakWatcher, phase: str) -> float:
    """The highest resident memory during the call above that before it, in MiB."""
    gc.collect()
    before = resident()
    watcher.phase = phase
    call()
    watcher.phase = "between"
    return watcher.peaks.get(phase, before) - before


def make_billion(folder: Path) -> Path:
    """Saves a model of the shape of Llama 3.2 1B, but for its vocabulary of 32,768, in bfloat16."""
    tokenizer = make_tokenizer()
    shape = {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "vocab_size": 32768,
    }
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 1024}
    ids = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    LlamaForCausalLM(LlamaConfig(**shape, **ids)).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main(rounds: int, billion: bool) -> None:
    """Measures, and prints the table."""
    with tempfile.TemporaryDirectory() as folder:
        measure(
            rounds,
            [f"actor_rollout_ref.model.path={make_billion(Path(folder))}"] if billion else [],
        )


def measure(rounds: int, model: list[str]) -> None:
    overrides = [
        "actor_rollout_ref.rollout.name=vllm",
        "data.val_files=null",
        "trainer.logger=file",
        *model,
    ]
    config = load_config(
        [*task(), *overrides, "trainer.default_local_dir=outputs/benchmark"]
    ).config
    trainer = build_trainer(config)
    trainer.init_workers()
    worker = trainer.actor_rollout_wg.worker
    engine = worker.rollout.engine
    watcher = PeakWatcher()
    watcher.start()
    worker.sync_weights()  # warm-up
    # Memory before the ready tensors exist, so that theirs cannot serve ours.
    ours_memory = max(extra_memory(worker.sync_weights, watcher, f"ours {i}") for i in range(3))
    ready = [
        (name, tensor.clone())
        for name, tensor in iter_weights(worker.module, torch_dtype(worker.policy.rollout.dtype))
    ]
    copy = sum(tensor.nbytes for _, tensor in ready) / MIB

    def bare() -> None:
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(ready)})

    bare()
    bare_memory = max(extra_memory(bare, watcher, f"bare {i}") for i in range(3))
    calls = {"ours": worker.sync_weights, "bare": bare}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in sorted(calls, reverse=number % 2 == 1):
            times[name].append(seconds(calls[name]))
    ours, limit = statistics.median(times["ours"]), statistics.median(times["bare"])
    count = sum(parameter.numel() for parameter in worker.module.parameters())
    print(
        f"\n{count / 1e6:.1f}M parameters, a copy for the engine {copy:.0f} MiB; "
        f"medians of {rounds} rounds in turns"
    )
    print("\n| | ours | bare reload | ratio | target |\n|---|---|---|---|---|")
    print(
        f"| time | {ours:.3f} s | {limit:.3f} s | {ours / limit:.2f} | at most {TIME_TARGET:.1f} |"
    )
    print(f"| extra memory | {ours_memory:.0f} MiB | {bare_memory:.0f} MiB | | |")
    print(
        f"| extra memory / copy | {ours_memory / copy:.2f} | {bare_memory / copy:.2f} "
        f"| | under {MEMORY_TARGET:.1f} |"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--billion", action="store_true")
    main(**vars(parser.parse_args()))
