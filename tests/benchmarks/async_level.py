"""What generation ahead of training gains, and what slow environments then cost.

A step at `trainer.async_level` 1 against 0, one rank that trains and one that samples with vLLM, a
core each, on a Llama made from a config.

    still, slow     environments of `environment_load`: `step` answers at once, or sleeps: mean
                    0.2 s, 99th percentile 2 s; 24 episodes (6 x 4) of three turns of 24 tokens
    0, 1            the level; --epochs sets how long training takes against generation, which the
                    first table shows
    groups          level 0 with `trainer.train_finished_groups`, in one epoch, on those ranks and
                    on one that does both

Each variant is a run of `main.py` of its own; figures are medians of its steps but the first three.

Run with nothing else on the machine, for what each target asks:

    python -m tests.benchmarks.async_level --variants 0 1 --prompts 1 --samples 2 --environments
    Still python -m tests.benchmarks.async_level --variants 1 groups "groups, one rank"
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.prepare_tiny_prompts import make_tokenizer

WARM_UP = 3
TARGETS = {"level 1 against 0": "at least 1.40", "slow against still": "at most 1.15"}
# What each variant adds.
VARIANTS = {
    "0": ("trainer.rollout_n_gpus=1",),
    "1": ("trainer.rollout_n_gpus=1", "trainer.async_level=1"),
    "groups": ("trainer.rollout_n_gpus=1", "trainer.train_finished_groups=true"),
    "groups, one rank": ("trainer.train_finished_groups=true",),
    "one rank": (),
}


def make_model(folder: Path, width: int) -> Path:
    """Saves a model of six layers that knows nothing, with the quickstart's tokenizer.

    512 wide 20 million weights.
    """
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    shape = {"hidden_size": width, "intermediate_size": 11 * width // 4}
    shape |= {"num_hidden_layers": 6, "num_attention_heads": width // 64}
    ids = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape, **ids)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(
    model: Path, environment: str, variant: str, steps: int, epochs: int, prompts: int, samples: int
) -> dict[str, float]:
    """Trains in processes of its own; the median seconds of each phase."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [
            *(
                sys.executable,
                "main.py",
                "configs/quickstart.yaml",
                f"actor_rollout_ref.model.path={model}",
            ),
            *(
                "actor_rollout_ref.rollout.name=vllm",
                f"actor_rollout_ref.rollout.n={samples}",
                "algorithm.adv_estimator=grpo",
            ),
            *(
                "actor_rollout_ref.rollout.ignore_eos=true",
                f"data.train_batch_size={prompts}",
                "agent.val_length=0",
            ),
            *(
                "data.max_prompt_length=64",
                "data.max_response_length=128",
                "agent.trial_episodes=0",
            ),
            "agent.environment.path=tests/benchmarks/environment_load.py",
            *(f"agent.environment.cls={environment}", "agent.environment.kwargs={}"),
            *(
                "agent.max_turn=3",
                "agent.max_turn_tokens=24",
                "alarms.mode=off",
                "trainer.logger=file",
            ),
            *(
                "actor_rollout_ref.actor.ppo_mini_batch_size=null",
                f"actor_rollout_ref.actor.ppo_epochs={epochs}",
            ),
            *(
                f"trainer.total_training_steps={steps}",
                "agent.allow_different_tasks=true",
                *VARIANTS[variant],
            ),
            *(
                f"trainer.default_local_dir={folder}",
                "trainer.save_freq=-1",
                "trainer.launcher=ray",
            ),
        ]
        environ = os.environ | {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
        subprocess.run(argv, check=True, env=environ, stdout=subprocess.DEVNULL)
        lines = [
            json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()
        ][WARM_UP:]
    phases = (
        "timing_s/step",
        "timing_s/gen",
        "timing_s/update_actor",
        "timing_s/update_weights",
        "async/staleness_mean",
    )
    return {name: statistics.median(line.get(name, 0.0) for line in lines) for name in phases}


def main(
    steps: int,
    epochs: int,
    prompts: int,
    samples: int,
    width: int,
    variants: list[str],
    environments: list[str],
) -> None:
    """Prints the table and the ratios."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), width)
        found = {
            (environment, variant): run(
                model,
                environment,
                variant,
                steps,
                epochs if variant in "01" else 1,
                prompts,
                samples,
            )
            for variant in variants
            for environment in environments
        }
    told = f"{epochs} epochs, {samples * prompts} episodes, {width} wide"
    print(f"medians of {steps - WARM_UP} steps, {told}; load {os.getloadavg()[0]:.2f}")
    print(
        "| environment | variant | "
        + " | ".join(next(iter(found.values())))
        + " |\n|---|---|"
        + "---|" * 5
    )
    for (environment, variant), seconds in found.items():
        print(
            f"| {environment} | {variant} | "
            + " | ".join(f"{value:.3f}" for value in seconds.values())
            + " |"
        )
    step = {key: seconds["timing_s/step"] for key, seconds in found.items()}
    gain, cost = TARGETS
    if {"0", "1"} <= {*variants}:
        print(f"{gain}: {step['Still', '0'] / step['Still', '1']:.2f} ({TARGETS[gain]})")
    for variant in variants if len(environments) == 2 else ():
        ratio = step["Slow", variant] / step["Still", variant]
        print(f"{cost}, {variant}: {ratio:.2f} ({TARGETS[cost]})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--environments", nargs="+", default=["Still", "Slow"])
    parser.add_argument("--variants", nargs="+", default=[*VARIANTS], choices=[*VARIANTS])
    main(**vars(parser.parse_args()))
