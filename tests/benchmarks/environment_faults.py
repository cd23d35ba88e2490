"""Training with environments of which a fifth fails.

The run ends normally, counts every failure, and leaves nothing behind.

By its seed an episode meets an environment that raises in its step (10 %; in a process of its own
it also dies), hangs beyond its deadline (5 %), or returns garbage (5 %): no tuple, a reward that is
NaN, or an observation of a megabyte, which is cut and no failure. What a step's metrics must say
follows from the seeds alone: an episode that does not fail lasts its three turns.

python -m tests.benchmarks.environment_faults [--steps 50] [--isolation thread process]
[--on-failure zero mask refill]
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from data.seeds import seed_for
from examples.prepare_tiny_prompts import make_model, make_tokenizer
from tests.benchmarks import faulty_environment
from tests.benchmarks.faulty_environment import ENDINGS, HANG_S, kind_of
from training.building import build_trainer
from training.config import PPOConfig
from training.config.loader import load_config
from workers.rollout.episode import ENDINGS as ALL_ENDINGS

TURNS, EPISODES, REFILLS = 3, 16, 2
DEADLINE_S = 0.5
OBSERVATION = 80  # characters that are kept of what an environment says


def write_model(folder: Path) -> None:
    """The quickstart's tiny model with random weights."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def faulty_config(
    model: Path, run: Path, steps: int, isolation: str, on_failure: str, *, seed: int = 0
) -> PPOConfig:
    home = f"isolation: {isolation}, kwargs: {{deadly: {isolation != 'thread'}}}"
    overrides = [
        "configs/quickstart.yaml",
        f"agent.environment={{path: {faulty_environment.__file__}, cls: Faulty, {home}}}",
        f"agent.max_turn={TURNS}",
        f"agent.step_timeout_s={DEADLINE_S}",
        f"agent.on_failure={on_failure}",
        f"agent.max_refills={REFILLS}",
        f"agent.max_observation_chars={OBSERVATION}",
        "agent.val_length=0",
        "trainer.save_freq=-1",
        f"data.seed={seed}",
        f"data.train_batch_size={EPISODES}",
        "data.max_response_length=64",
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={EPISODES}",
        "actor_rollout_ref.actor.ppo_epochs=1",
        "algorithm.adv_estimator=reinforce_plus_plus",
        f"trainer.default_local_dir={run}",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
        "trainer.logger=file",
    ]
    return load_config(overrides).config


def expected_counts(seed: int, step: int) -> Counter[str]:
    """The endings of a step's episodes."""
    kinds = [kind_of(seed_for(seed, step, group)) for group in range(EPISODES)]
    return Counter(ENDINGS.get(kind, "max_turns") for kind in kinds)


def wrong_counts(steps: list[dict[str, Any]], seed: int, on_failure: str) -> list[str]:
    """What the metrics say otherwise than the seeds."""
    wrong = []
    for metrics in steps:
        step, expected = int(metrics["step"]), expected_counts(seed, int(metrics["step"]))
        said = {name: metrics[f"agent/ending/{name}"] for name in ALL_ENDINGS}
        if any(said[name] != expected[name] for name in ALL_ENDINGS):
            wrong.append(f"step {step}: {said}, expected {dict(expected)}")
        retries = REFILLS * expected["env_crash"] if on_failure == "refill" else 0
        if metrics["agent/retries"] != retries:
            wrong.append(f"step {step}: {metrics['agent/retries']:.0f} retries, expected {retries}")
    return wrong


def left_behind(before: tuple[set[Any], set[Any]], wait_s: float) -> list[str]:
    """Returns the new threads and processes that are there once hanging ones had time to return."""
    end = time.monotonic() + wait_s
    while True:
        left = [
            sorted(map(str, now - then))
            for now, then in zip(threads_and_processes(), before, strict=True)
        ]
        if not any(left) or time.monotonic() > end:
            return left[0] + left[1]
        time.sleep(0.05)


def threads_and_processes() -> tuple[set[Any], set[Any]]:
    return set(threading.enumerate()), set(psutil.Process().children(recursive=True))


class Ended(NamedTuple):
    """What a run leaves: its steps' metrics, and what `wrong_counts` and `left_behind` found."""

    steps: list[dict[str, Any]]
    wrong: list[str]
    left: list[str]

    def generation(self, seed: int, *, hanging: bool) -> list[float]:
        """Seconds of generation of those steps in which an environment hung, or none did."""
        return [
            metrics["timing_s/gen"]
            for metrics in self.steps
            if (expected_counts(seed, int(metrics["step"]))["env_timeout"] > 0) == hanging
        ]


def train(
    model: Path, run: Path, steps: int, isolation: str, on_failure: str, *, seed: int = 0
) -> Ended:
    """Trains, in this process."""
    before = threads_and_processes()
    trainer = build_trainer(faulty_config(model, run, steps, isolation, on_failure, seed=seed))
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.shutdown()
    del trainer
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "timing_s/gen" in line]
    return Ended(trained, wrong_counts(trained, seed, on_failure), left_behind(before, HANG_S + 1))


def main(args: argparse.Namespace) -> None:
    print(
        f"{args.steps} steps of {EPISODES} episodes; a step of the environment has {DEADLINE_S} s, "
        f"one that hangs takes {HANG_S} s"
    )
    print(
        "| isolation | on_failure | failed | counts | left "
        "| generation, nothing hangs | something hangs |\n|" + "---|" * 7
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        for isolation in args.isolation:
            for on_failure in args.on_failure:
                ended = train(
                    folder / "model",
                    folder / f"{isolation}-{on_failure}",
                    args.steps,
                    isolation,
                    on_failure,
                )
                print(row(isolation, on_failure, ended), flush=True)


def row(isolation: str, on_failure: str, ended: Ended) -> str:
    sums = {
        name: sum(metrics[f"agent/ending/{name}"] for metrics in ended.steps)
        for name in ALL_ENDINGS
    }
    failed = f"{sums['env_crash']:.0f} crashed, {sums['env_timeout']:.0f} hung"
    counts = f"{len(ended.steps)} steps exact" if not ended.wrong else "; ".join(ended.wrong[:3])
    seconds = [ended.generation(0, hanging=hanging) or [float("nan")] for hanging in (False, True)]
    shown = [f"{statistics.median(own):.2f} s, at most {max(own):.2f}" for own in seconds]
    left = ", ".join(ended.left) or "nothing"
    return f"| {isolation} | {on_failure} | {failed} | {counts} | {left} | {' | '.join(shown)} |"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Training with environments that fail")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--isolation", nargs="+", default=["thread", "process"])
    parser.add_argument("--on-failure", nargs="+", default=["zero", "mask", "refill"])
    return parser.parse_args(argv)


if __name__ == "__main__":
    # One warning for each step's failures.
    logging.getLogger("training.agent_trainer").setLevel(logging.ERROR)
    main(parse())
