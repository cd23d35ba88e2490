"""Trains with a rollout engine that the file of `custom_algorithm` registers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_training import tiny_config
from training.building import build_trainer
from training.config.loader import ConfigError
from workers.rollout import engine_registry

ENGINE = """
from workers.hf_rollout import HFRollout

class Counting(HFRollout):
    steps = 0

    def step(self):
        type(self).steps += 1
        return super().step()
"""


def test_a_run_generates_with_an_engine_of_ones_own(
    tiny_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_registry, "ENGINES", dict(engine_registry.ENGINES))
    engine = tmp_path / "my_engine.py"
    engine.write_text(ENGINE)
    registration = tmp_path / "registers_it.py"
    registration.write_text(
        "from workers.rollout.engine_registry import register_engine\n"
        f"register_engine('counting', '{engine}:Counting')\n"
    )
    named = "actor_rollout_ref.rollout.name=counting"
    with pytest.raises(ConfigError, match=r"rollout\.name='counting' is unknown; allowed: hf, "):
        tiny_config(tiny_task, tmp_path / "run", named)
    config = tiny_config(tiny_task, tmp_path / "run", named, f"custom_algorithm={registration}")
    trainer = build_trainer(config)
    trainer.init_workers()
    assert trainer.validate()
    assert engine_registry.load_engine_class("counting").steps > 0  # type: ignore[attr-defined]
