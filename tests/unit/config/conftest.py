"""Gives the tests of the settings a config that passes every check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.config.helpers import ROLLOUT, ROW
from training.config.schema.data import DataConfig

# A step's.
NUM_ROWS = DataConfig().train_batch_size


@pytest.fixture
def runnable(tmp_path: Path) -> list[str]:
    """Gives overrides of a run that passes every check on any machine."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    (model / "tokenizer.json").touch()
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(ROW) + "\n") * NUM_ROWS)
    return [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={tmp_path / 'train.jsonl'}",
        f"data.val_files={tmp_path / 'val.jsonl'}",
        f"{ROLLOUT}.name=hf",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        # The other loggers are a feature's.
        "trainer.logger=[console]",
    ]
