"""How long a checkpoint holds up training.

SmolLM2-135M with vLLM, the same step again and again (hardly any learning rate, same prompts and
seeds).

    none         two steps
    background   a save is begun, then two steps, then what is left of the save
    waited       a save is begun and waited for, then two steps

A stall is what two steps take more than without a save, as a share of one step. Run with nothing
else on the machine: python -m tests.benchmarks.checkpoint_stall [ROUNDS]
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from pathlib import Path

from tests.benchmarks.step_vs_limit import OVERRIDES
from training.building import build_trainer
from training.config.loader import load_config
from training.ray_trainer import RayPPOTrainer
from training.run.step_source import PendingStep

RUN_DIR = Path("outputs/benchmark-checkpoint")
STEPS = 2


def timed_steps(trainer: RayPPOTrainer, step: PendingStep, kind: str) -> tuple[float, float]:
    """Seconds of the steps with their save, and of `begin` alone."""
    shutil.rmtree(RUN_DIR, ignore_errors=True)
    begin, start = 0.0, time.perf_counter()
    if kind != "none":
        begin = trainer.save_checkpoint()["timing_s/save_checkpoint"]
    if kind == "waited":
        trainer.saver.poll(wait=True)
    for _ in range(STEPS):
        trainer.global_steps = 1
        trainer.train_step(step)
        trainer.saver.poll()
    trainer.saver.close()
    return time.perf_counter() - start, begin


def main(rounds: int) -> None:
    fixed = [
        "trainer.deterministic=true",
        "actor_rollout_ref.actor.optim.lr=1e-12",
        "trainer.total_training_steps=10",
    ]
    argv = [
        "configs/smollm2_arithmetic.yaml",
        *OVERRIDES,
        *fixed,
        f"trainer.default_local_dir={RUN_DIR}",
    ]
    trainer = build_trainer(load_config(argv).config)
    trainer.init_workers()
    step = next(iter(trainer.training_batches()))
    kinds = ("none", "background", "waited")
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    begins = []
    timed_steps(trainer, step, "background")  # warms up
    for number in range(rounds):
        for kind in (*kinds[number % 3 :], *kinds[: number % 3]):
            taken, begin = timed_steps(trainer, step, kind)
            seconds[kind].append(taken)
            if kind == "background":
                begins.append(begin)
        print({kind: round(values[-1], 2) for kind, values in seconds.items()}, flush=True)
    plain = statistics.median(seconds["none"])
    print(f"\n| medians of {rounds} rounds | seconds | stall, share of a step |\n|---|---|---|")
    for kind in kinds:
        value = statistics.median(seconds[kind])
        stall = (value - plain) / (plain / STEPS)
        print(f"| {STEPS} steps, save: {kind} | {value:.2f} | {stall:.1%} |")
    begin = statistics.median(begins)
    print(f"| `begin` alone | {begin:.3f} | {begin / (plain / STEPS):.1%} |")
    shutil.rmtree(RUN_DIR, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
