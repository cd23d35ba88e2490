"""What recording costs: seconds of a step with records, against the same step without.

    python -m tests.benchmarks.recording_cost CONFIG.yaml key=value ... [--steps 20]

Two trainers of one config make their steps in turn in this process, on one rank: the one records,
the other does not, and both compute the same. CPU seconds are of all threads, until the step's
files are written; wall seconds until `train_step` returns. The parts are the CPU seconds of the
recording code itself, which are less noisy than a difference of steps.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from features.records.episode_recorder import EpisodeRecorder
from features.records.token_origins import TokenOrigins
from features.records.token_record import TokenRecorder
from training.building import build_trainer
from training.config.loader import load_config
from workers import agent_rollout

PARTS = (
    (TokenOrigins, "of_episode"),
    (agent_rollout, "row_records"),
    (agent_rollout, "episode_record"),
    (agent_rollout, "encode_record"),
    (agent_rollout, "origin_matrix"),
    (TokenRecorder, "see"),
    (TokenRecorder, "take"),
    (EpisodeRecorder, "begin_update"),
    (EpisodeRecorder, "played"),
    (EpisodeRecorder, "scored"),
    (EpisodeRecorder, "trained"),
    (EpisodeRecorder, "write"),
)


class Clock:
    """Adds up the CPU seconds that threads spend in functions; within another only the outer."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.inside = threading.local()
        self.own_seconds = 0.0
        self.own_seconds = self.measure_itself()

    def measure_itself(self, calls: int = 10_000) -> float:
        """Returns the seconds that it counts for a call of nothing, which it then leaves out."""
        nothing = self.timed("nothing", lambda: None)
        for _ in range(calls):
            nothing()
        return self.seconds.pop("nothing") / calls

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if getattr(self.inside, "now", False):
                return function(*args, **kwargs)
            self.inside.now = True
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.inside.now = False
                spent = time.thread_time() - began - self.own_seconds
                self.seconds[name] = self.seconds.get(name, 0.0) + spent

        return measured


def make_trainer(words: list[str], folder: Path, *, records: bool) -> Any:
    """Builds a trainer with a folder of its own, which trains without validation or saves."""
    name = "on" if records else "off"
    settings = [f"trainer.default_local_dir={folder / name}", "trainer.logger=file"]
    settings += [f"agent.episodes_keep={2 if records else 0}", "trainer.save_freq=-1"]
    trainer = build_trainer(load_config([*words, *settings, "trainer.launcher=local"]).config)
    trainer.init_workers()
    return trainer


def measure(trainer: Any, step: Any) -> tuple[float, float]:
    """Makes a step; returns its CPU seconds, files included, and its wall seconds."""
    cpu = time.process_time()
    wall = time.perf_counter()
    trainer.train_step(step)
    seconds = time.perf_counter() - wall
    trainer.recorder.flush()
    return time.process_time() - cpu, seconds


def main(argv: list[str] | None = None) -> None:
    """Trains twice, and prints what recording cost."""
    parser = argparse.ArgumentParser(description="What recording costs of a step.")
    parser.add_argument("words", nargs="+", metavar="CONFIG.yaml key=value")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)
    clock = Clock()
    patches = [
        patch.object(holder, name, clock.timed(name, getattr(holder, name)))
        for holder, name in PARTS
    ]
    results: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with TemporaryDirectory() as folder:
        for each in patches:
            each.start()
        trainers = {on: make_trainer(args.words, Path(folder), records=on) for on in (True, False)}
        steps = {on: trainer.training_batches() for on, trainer in trainers.items()}
        for number in range(args.steps + 1):
            for on in (True, False) if number % 2 else (False, True):
                results[on].append(measure(trainers[on], next(steps[on])))
            if number == 0:
                # Each warms up for a step.
                clock.seconds.clear()
                results = {True: [], False: []}
        size = sum(path.stat().st_size for path in Path(folder).glob("on/episodes/*.*"))
        for trainer in trainers.values():
            trainer.shutdown()
        for each in patches:
            each.stop()
    tell(results, clock, args.steps, size)


def tell(
    results: dict[bool, list[tuple[float, float]]], clock: Clock, steps: int, size: int
) -> None:
    """Prints medians of steps, the paired difference, and the parts."""
    for place, kind in enumerate(("CPU", "wall")):
        on = [seconds[place] for seconds in results[True]]
        off = [seconds[place] for seconds in results[False]]
        difference = statistics.median(a - b for a, b in zip(on, off, strict=True))
        usual = statistics.median(off)
        print(
            f"{kind:4} seconds a step: {statistics.median(on):.4f} with records, {usual:.4f} "
            f"without; median difference {difference * 1000:+.1f} ms, {difference / usual:+.2%}"
        )
    usual = statistics.median(seconds[0] for seconds in results[False])
    for name, seconds in sorted(clock.seconds.items(), key=lambda item: -item[1]):
        print(f"  {name:16} {seconds / steps * 1000:8.2f} ms  {seconds / steps / usual:7.2%}")
    whole = sum(clock.seconds.values()) / steps
    print(f"recording code: {whole * 1000:.1f} ms CPU a step, {whole / usual:.2%} of a step's")
    print(f"files: {size / (steps + 1) / 1024:.0f} KiB a step")


if __name__ == "__main__":
    main()
