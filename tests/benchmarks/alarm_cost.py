"""What alarms cost: CPU seconds of their code, in driver and workers, against the step's.

    python -m tests.benchmarks.alarm_cost CONFIG.yaml key=value ...

The run is in this process, with its own folder. The canaries, which are part of the weight sync,
are not counted.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from features.alarms.monitor import Alarms
from features.alarms.probes import gradients
from features.alarms.probes.gradients import GradientAlignment, KeptGradients, LostGradients
from features.alarms.probes.losses import FirstUpdateDifference, LossCounts
from features.alarms.probes.movement import StillTensors
from features.alarms.probes.reference import ReferenceMovement
from training.building import build_trainer
from training.config.loader import load_config

PARTS = (
    (Alarms, "step_made"),
    (Alarms, "scored"),
    (LossCounts, "before_backward"),
    (FirstUpdateDifference, "before_backward"),
    (GradientAlignment, "before_backward"),
    (gradients, "alignment_sums"),
    (KeptGradients, "begin"),
    (LostGradients, "begin"),
    (LostGradients, "_add"),
    (LostGradients, "before_step"),
    (StillTensors, "begin"),
    (StillTensors, "take"),
    (ReferenceMovement, "read"),
)


class Clock:
    """Adds up the CPU seconds of functions; of one within another only the outer one counts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.inside = False

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return function(*args, **kwargs)
            self.inside = True
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.inside = False
                self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - began

        return measured


def main(argv: list[str]) -> None:
    """Trains, and prints the seconds of each part and their share of the steps'."""
    parser = argparse.ArgumentParser(description="What alarms cost of a step's CPU seconds.")
    parser.add_argument("words", nargs="+", metavar="CONFIG.yaml key=value")
    trainer = build_trainer(load_config(parser.parse_args(argv).words).config)
    alarms = Clock()
    steps = Clock()
    patches = [
        patch.object(holder, name, alarms.timed(f"{holder.__name__}.{name}", getattr(holder, name)))
        for holder, name in PARTS
    ]
    trainer.train_step = steps.timed("train_step", trainer.train_step)
    for each in patches:
        each.start()
    try:
        trainer.fit()
    finally:
        for each in patches:
            each.stop()
        trainer.shutdown()
    whole = steps.seconds["train_step"]
    for name, seconds in sorted(alarms.seconds.items(), key=lambda item: -item[1]):
        print(f"{name:40} {seconds:8.3f} s  {seconds / whole:7.3%}")
    share = sum(alarms.seconds.values()) / whole
    print(f"alarms {sum(alarms.seconds.values()):.3f} of {whole:.3f} CPU seconds: {share:.2%}")


if __name__ == "__main__":
    main(sys.argv[1:])
