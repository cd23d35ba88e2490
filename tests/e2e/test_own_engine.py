"""Trains with a rollout engine that the file of `custom_algorithm` registers."""

from __future__ import annotations

from pathlib import Path

import pytest

from setup import create_inference_engine
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


def test_the_python_api_generates_with_an_engine_of_ones_own(
    tiny_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_registry, "ENGINES", dict(engine_registry.ENGINES))
    (tmp_path / "my_engine.py").write_text(ENGINE)
    model = str(tiny_task / "model")
    settings = {"dtype": "float32", "max_model_len": 64}
    with pytest.raises(ValueError, match="backend='counting' is unknown; allowed: hf, sglang, vl"):
        create_inference_engine(model, "counting", settings)
    engine_registry.register_engine("counting", f"{tmp_path}/my_engine.py:Counting")
    engine = create_inference_engine(model, "counting", settings)
    (answer,) = engine.generate("2 + 3?", max_tokens=4, temperature=0).token_ids
    expected = create_inference_engine(model, "hf", settings)
    assert answer == expected.generate("2 + 3?", max_tokens=4, temperature=0).token_ids[0]
    assert engine_registry.load_engine_class("counting").steps > 0  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"has one rank \(backend='counting'\)"):
        create_inference_engine(model, "counting", {"tensor_parallel_size": 2})
