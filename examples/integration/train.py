"""The same run from Python: settings, trainer, steps, and the end of its workers."""

from __future__ import annotations

import sys

from training.building import build_trainer
from training.config.loader import ConfigError, load_config


def main(overrides: list[str]) -> dict[str, float]:
    """Trains, and returns the last step's metrics."""
    loaded = load_config(["train.yaml", "trainer.default_local_dir=run_python", *overrides])
    trainer = build_trainer(loaded.config)
    try:
        return trainer.fit()
    finally:
        trainer.shutdown()


# Needed where processes import this file again, as those of reward_model.reward_manager=prime do.
if __name__ == "__main__":
    try:
        metrics = main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(str(error))
    reward = metrics["critic/score/mean"]
    num_calls = metrics["tool/stock/calls"]
    print(f"reward {reward:.2f}, calls of the tool {num_calls:.0f}")
