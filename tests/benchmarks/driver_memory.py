"""Memory and time of the driver's side of a GRPO step.

Prompts of 1,024 tokens, responses of up to 15,360, eight ranks.

A step is what the driver does between the workers' calls: it takes the ranks' batches as Ray hands
them over, joins and arranges them, scores, computes advantages, packs what each rank is to be given
for the update, and summarises. What Ray holds of them counts as the driver's. Each number of rows
runs in a process of its own, and the two largest give a line on to 65,536 rows; what is of constant
size is in both. Two cases: every row full, and lengths that are log-normal with a mean of 2,048
tokens.

Run with nothing else on the machine: python -m tests.benchmarks.driver_memory
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.array_ops import object_array
from data.protocol import DataProto
from training.advantage import compute_advantage
from training.batch.rank_layout import arrange
from training.config import BatchPlan, UpdatePlan
from training.reward import compute_reward
from training.run.metrics.step_metrics import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
)
from workers.fsdp_workers import ActorRolloutRefWorker
from workers.ranks.dispatch import registered_methods, split_batch
from workers.ranks.memory import keep_heap

PROMPT, RESPONSE, MEAN, RANKS, GROUP, PAD = 1024, 15_360, 2_048, 8, 8, 0
ROWS, TARGET_ROWS, TARGET_GIB = (256, 512, 1024), 65_536, 32
GIB = 1 << 30
READS = registered_methods(ActorRolloutRefWorker)["update_actor"].reads
Stored = tuple[bytes, list[bytes]]


def lengths_of(rows: int, full: bool) -> np.ndarray:
    """Tokens of each response."""
    drawn = np.random.lognormal(np.log(MEAN) - 0.5, 1.0, rows).astype(int).clip(1, RESPONSE)
    return np.full(rows, RESPONSE) if full else drawn


def generated(first: int, rows: int, full: bool) -> DataProto:
    """What a rank answers to generate_sequences, in the dtypes and columns of `BaseRollout`."""
    held = np.arange(RESPONSE) < lengths_of(rows, full)[:, None]
    asked = (
        np.arange(PROMPT)
        >= PROMPT - np.repeat(np.random.randint(PROMPT // 2, PROMPT, rows // GROUP), GROUP)[:, None]
    )
    asked |= full
    ids = np.random.randint(1, 50_000, (rows // GROUP, PROMPT), dtype=np.int32).repeat(
        GROUP, axis=0
    )
    arrays = {
        "prompts": np.where(asked, ids, PAD),
        "responses": np.where(held, np.random.randint(1, 50_000, held.shape, dtype=np.int32), PAD),
        "response_mask": held.astype(np.int8),
        "turn_ids": np.where(held, 0, -1).astype(np.int16),
        "attention_mask": np.concatenate([asked, held], axis=1).astype(np.int8),
        "rollout_log_probs": np.where(held, -np.random.rand(*held.shape), 0).astype(np.float32),
    }
    numbers = range(first, first + rows)
    raw = [row[mask].tolist() for row, mask in zip(ids[::GROUP], asked[::GROUP], strict=True)]
    columns = {
        "uid": [f"1.{i // GROUP}" for i in numbers],
        "episode_id": [f"1.{i // GROUP}.{i % GROUP}" for i in numbers],
        "reward_model": [{"style": "rule", "ground_truth": str(i)} for i in numbers],
        "raw_prompt_ids": [raw[i // GROUP] for i in range(rows)],
    }
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return DataProto.from_dict(
        tensors, {name: object_array(column) for name, column in columns.items()}
    )


def stored(data: DataProto) -> Stored:
    """The bytes that Ray's store would hold."""
    buffers: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    return payload, [bytes(buffer.raw()) for buffer in buffers]


def write_answers(folder: Path, rows: int, full: bool) -> None:
    """Is the ranks."""
    for rank in range(RANKS):
        np.random.seed(rank)
        answer = stored(generated(rank * rows // RANKS, rows // RANKS, full))
        (folder / f"{rank}.pkl").write_bytes(pickle.dumps(answer))


def memory(field: str) -> int:
    """Bytes of this process: VmRSS, or VmHWM, the most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def received(folder: Path) -> DataProto:
    """What `RayWorkerGroup` makes of the answers, which Ray holds until all are there."""
    answers: list[Stored] = [
        pickle.loads((folder / f"{rank}.pkl").read_bytes()) for rank in range(RANKS)
    ]
    parts = [pickle.loads(payload, buffers=buffers) for payload, buffers in answers]
    del answers
    return DataProto.concat(parts)


def drive(folder: Path) -> dict[str, dict[str, float]]:
    """Goes through a step as the driver; returns the seconds and the peak of each of its phases."""
    found: dict[str, dict[str, float]] = {}
    start = memory("VmRSS")

    def phase(name: str, call: Callable[[], Any]) -> Any:
        forget_peak()
        began = time.perf_counter()
        result = call()
        found[name] = {
            "seconds": time.perf_counter() - began,
            "peak": (memory("VmHWM") - start) / GIB,
        }
        return result

    batch = phase("receive and concat", lambda: received(folder))
    once = UpdatePlan(mini_batches=1)
    plan = BatchPlan(
        prompts=len(batch) // GROUP, ranks=RANKS, balance=True, actor=once, critic=once
    )
    batch = phase("arrange", lambda: arrange(batch, plan))
    scores, _ = phase(
        "scores", lambda: compute_reward(batch, lambda data: data.batch["responses"][:, 0] % 7 / 7)
    )
    batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = scores
    phase("advantages", lambda: compute_advantage(batch, "grpo"))
    phase("hand to ranks", lambda: [stored(chunk) for chunk in split_batch(batch, READS, RANKS)])
    timing = {"step": 1.0, "gen": 1.0, "update_actor": 1.0}
    phase("metrics", lambda: compute_data_metrics(batch, use_critic=False))
    phase(
        "metrics of time",
        lambda: (
            compute_timing_metrics(batch, timing),
            compute_throughout_metrics(batch, timing, 8),
        ),
    )
    return found


def measure(rows: int, full: bool) -> dict[str, dict[str, float]]:
    """Runs ranks and driver, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        for role in ("ranks", "driver"):
            command = [
                sys.executable,
                "-m",
                "tests.benchmarks.driver_memory",
                role,
                folder,
                str(rows),
                str(int(full)),
            ]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        return json.loads(out.splitlines()[-1])


def extended(smaller: float, larger: float) -> float:
    """The line through what the two largest numbers of rows took, at the target's."""
    return larger + (larger - smaller) / (ROWS[-1] - ROWS[-2]) * (TARGET_ROWS - ROWS[-1])


def main() -> None:
    for full in (True, False):
        runs = [measure(rows, full) for rows in ROWS]
        name = "every row full" if full else f"lengths log-normal, mean {MEAN}"
        print(f"\n{name}: GiB beyond the start, and seconds\n")
        print(f"| phase | {' | '.join(map(str, ROWS))} | {TARGET_ROWS} |")
        print("|---" * (len(ROWS) + 2) + "|")
        worst = took = 0.0
        for phase in runs[0]:
            peaks, seconds = ([run[phase][kind] for run in runs] for kind in ("peak", "seconds"))
            peak, spent = extended(*peaks[-2:]), seconds[-1] * TARGET_ROWS / ROWS[-1]
            worst, took = max(worst, peak), took + spent
            cells = [f"{gib:.3f} GiB, {s:.2f} s" for gib, s in zip(peaks, seconds, strict=True)]
            print(f"| {phase} | {' | '.join(cells)} | {peak:.1f} GiB, {spent:.0f} s |", flush=True)
        print(f"\n{TARGET_ROWS} rows: **{worst:.1f} GiB** (at most {TARGET_GIB}), {took:.0f} s")


if __name__ == "__main__":
    keep_heap()
    match sys.argv[1:]:
        case ["ranks", folder, rows, full]:
            write_answers(Path(folder), int(rows), full == "1")
        case ["driver", folder, _, _]:
            print(json.dumps(drive(Path(folder))))
        case _:
            main()
