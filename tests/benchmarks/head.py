"""Time and memory of a language model's head, forward and backward.

They stand against those of torch's cross_entropy on whole logits.

    python -m tests.benchmarks.head                 sizes for a CPU, a minute or two
    python -m tests.benchmarks.head --device cuda   Qwen2.5's at 16,384 tokens
    python -m tests.benchmarks.head --sizes 4096x1536x151936 --dtype float32

A size is tokens x hidden x vocabulary. Weights are float32 and tied to nothing; products are in
autocast's type. Memory is the most above what the inputs and the gradients hold. On a CPU it is the
process's, sampled every 5 ms, and time is of one thread: what else runs on the machine does not
count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from tests.benchmarks.peak_memory import MIB, PeakWatcher, resident
from training.batch.head import LogitForm, head_log_probs
from workers.ranks.memory import keep_heap

SIZES = {
    "cpu": ["1000x576x49152", "3000x576x49152", "512x896x151936"],
    "cuda": ["16384x576x49152", "16384x896x151936", "16384x1536x151936"],
}
Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def whole_logits(states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return -cross_entropy(linear(states, weight).float(), labels, reduction="none")


def ours(states: Tensor, weight: Tensor, labels: Tensor, *, entropy: Any) -> Tensor:
    return head_log_probs(states, weight, None, labels, LogitForm(), entropy)[0]


WAYS: dict[str, Head] = {"cross_entropy": whole_logits} | {
    f"ours, entropy {mode}": partial(ours, entropy=mode) for mode in ("none", "value", "grad")
}


def once(
    head: Head, inputs: tuple[Tensor, Tensor, Tensor], weights: Tensor, dtype: torch.dtype
) -> tuple[float, float]:
    """Returns the seconds of the forward pass, and of both."""
    device = weights.device
    for tensor in inputs[:2]:
        tensor.grad = None
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    start = clock()
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        log_probs = head(*inputs)
    synchronize(device)
    forward = clock() - start
    (log_probs @ weights).backward()
    synchronize(device)
    return forward, clock() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_mib(
    call: Callable[[], object], device: torch.device, held: Callable[[], int], watcher: PeakWatcher
) -> float:
    """Returns a call's peak of memory above that before it, less what it leaves in gradients."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) / MIB
        call()
        return torch.cuda.max_memory_allocated(device) / MIB - before - held() / MIB
    watcher.phase = "call"
    # A sample that was begun in the phase before may still be written.
    time.sleep(0.05)
    before, watcher.peaks["call"] = resident(), 0.0
    call()
    watcher.phase = "rest"
    return watcher.peaks["call"] - before - held() / MIB


def measure(
    size: str, device: torch.device, dtype: torch.dtype, repeats: int, watcher: PeakWatcher
) -> None:
    tokens, hidden, vocabulary = (int(n) for n in size.split("x"))
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, device=device, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden, device=device) / hidden**0.5).requires_grad_()
    inputs = states, weight, torch.randint(vocabulary, (tokens,), device=device)
    weights = torch.randn(tokens, device=device)
    gradients: dict[str, Tensor] = {}
    for name, head in WAYS.items():
        run = partial(once, head, inputs, weights, dtype)
        run()
        states.grad = weight.grad = None
        memory = peak_mib(run, device, lambda: 4 * (states.numel() + weight.numel()), watcher)
        seconds = [run() for _ in range(repeats)]
        forward, both = (statistics.median(column) for column in zip(*seconds, strict=True))
        assert weight.grad is not None
        gradients[name] = weight.grad
        expected = gradients["cross_entropy"]
        off = ((weight.grad - expected).norm() / expected.norm()).item()
        print(
            f"{size:18s} {name:21s} {forward:8.3f} {both:8.3f} s {memory:8.0f} MiB  "
            f"gradient {off:.0e} off",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--sizes", nargs="+")
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    device = torch.device(given.device)
    watcher = PeakWatcher()
    if device.type == "cpu":
        keep_heap()
        torch.set_num_threads(1)
        watcher.start()
    print(f"{given.dtype}, {device}; seconds forward, and forward and backward")
    for size in given.sizes or SIZES[device.type]:
        measure(size, device, getattr(torch, given.dtype), given.repeats, watcher)


if __name__ == "__main__":
    main()
