"""TRL's GRPOTrainer against our step on the same 64 samples of SmolLM2-135M.

Each has a process of its own, in turns.

    ours   trainer.train_step as in step_vs_limit: generation by vLLM, reward, advantages, update,
           weights to the engine
    trl    GRPOTrainer as it comes on a CPU: generation by transformers, float32 weights under bf16
           autocast

Both: 8 prompts of outputs/smollm2/train.parquet (`make smollm2` makes it) x 8 samples, at most 64
new tokens, temperature 1, one update, no KL, no gradient checkpointing, the reward of the prompts'
own verifier. TRL is no requirement of this project: `pip install trl` first.

Run with nothing else on the machine: python -m tests.benchmarks.trl_step [ROUNDS]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import Any

import pyarrow.parquet

from custom.reward_score import default_compute_score
from tests.benchmarks.step_vs_limit import OVERRIDES
from training.building import build_trainer
from training.config.loader import load_config

CONFIG = [
    "configs/smollm2_arithmetic.yaml",
    *OVERRIDES,
    "trainer.default_local_dir=outputs/benchmark",
]
# Rows that TRL generates for, and trains on, at a time: in between lies the memory that 64 rows'
# logits would take.
TRL_ROWS = 16


def our_seconds(steps: int) -> list[float]:
    """Times whole steps of our trainer."""
    trainer = build_trainer(load_config(CONFIG).config)
    trainer.init_workers()
    seconds = []
    for rows in trainer.training_batches():
        start = time.perf_counter()
        trainer.train_step(rows)
        seconds.append(time.perf_counter() - start)
        if len(seconds) == steps:
            break
    return seconds


def trl_seconds(steps: int) -> list[float]:
    """Times TRL's steps, from the first accumulated batch to the end of the optimiser's step."""
    import datasets
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    config = load_config(CONFIG).config
    policy = config.actor_rollout_ref
    rows = pyarrow.parquet.read_table(config.data.train_files[0]).to_pylist()
    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            marks.append(-time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            marks[-1] += time.perf_counter()

    def reward(completions: list[Any], **columns: list[Any]) -> list[float]:
        given = zip(
            completions,
            columns["data_source"],
            columns["reward_model"],
            columns["extra_info"],
            strict=True,
        )
        return [
            score(default_compute_score(s, c[0]["content"], r["ground_truth"], e))
            for c, s, r, e in given
        ]

    samples = config.data.train_batch_size * policy.rollout.n
    arguments = GRPOConfig(
        output_dir="outputs/benchmark/trl",
        max_steps=steps,
        per_device_train_batch_size=TRL_ROWS,
        gradient_accumulation_steps=samples // TRL_ROWS,
        num_generations=policy.rollout.n,
        max_completion_length=config.data.max_response_length,
        temperature=policy.rollout.temperature,
        learning_rate=policy.actor.optim.lr,
        beta=0.0,
        gradient_checkpointing=False,
        bf16=True,
        use_cpu=True,
        model_init_kwargs={"dtype": "float32"},
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=config.data.run_seed,
    )
    GRPOTrainer(
        model=str(policy.model.path),
        reward_funcs=reward,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        callbacks=[Clock()],
    ).train()
    return marks


def score(found: Any) -> float:
    return float(found["score"] if isinstance(found, dict) else found)


def main(rounds: int) -> None:
    if find_spec("trl") is None:
        sys.exit(
            "TRL is not installed here, and no requirement of this project: "
            "pip install trl, then run this again"
        )
    seconds: dict[str, list[float]] = {"ours": [], "trl": []}
    for number in range(rounds):
        for name, kept in seconds.items():
            command = [sys.executable, "-m", "tests.benchmarks.trl_step", name]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            kept.append(float(done.stdout.split()[-1]))
        print(
            f"round {number + 1}: "
            + ", ".join(f"{name} {kept[-1]:.2f} s" for name, kept in seconds.items())
        )
    ours, trl = (statistics.median(kept) for kept in seconds.values())
    print(
        f"\nmedians of {rounds} rounds, 64 samples a step: ours {ours:.2f} s, TRL {trl:.2f} s, "
        f"ratio {ours / trl:.3f}"
    )


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "3"
    if chosen in ("ours", "trl"):
        # The first step warms up.
        timed = (our_seconds if chosen == "ours" else trl_seconds)(3)[1:]
        print(f"{chosen} seconds a step: {statistics.median(timed):.3f}")
    else:
        main(int(chosen))
