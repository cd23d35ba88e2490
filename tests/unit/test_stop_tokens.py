"""Which tokens end a turn: the tokenizer's, and those that the model's configs name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from training.config import ModelConfig
from workers.model.builder import ModelSpec

# config.json, generation_config.json (None: there is none), override_config -> stop tokens beside
# the tokenizer's, which is 2
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any], list[int]]] = {
    "config alone": ({"eos_token_id": [1, 2]}, None, {}, [1]),
    "config alone, one": ({"eos_token_id": 5}, None, {}, [5]),
    "generation config names none": ({"eos_token_id": [1, 2]}, {"top_k": 5}, {}, [1]),
    "generation config goes before": ({"eos_token_id": 1}, {"eos_token_id": [3, 4]}, {}, [3, 4]),
    "generation config, one": ({"eos_token_id": 1}, {"eos_token_id": 3}, {}, [3]),
    "the text part's": ({"text_config": {"eos_token_id": [6]}}, None, {}, [6]),
    "nobody's, whatever the class's default": ({}, None, {}, []),
    "override": ({"eos_token_id": 1}, {"eos_token_id": 3}, {"eos_token_id": [7, 2]}, [7]),
}


@pytest.mark.parametrize("name", CASES)
def test_stop_tokens_are_found_wherever_they_are_named(
    name: str, tiny_task: Path, tmp_path: Path
) -> None:
    config, generation, override, expected = CASES[name]
    model = tmp_path / "model"
    shutil.copytree(tiny_task / "model", model)
    (model / "generation_config.json").unlink()
    content = json.loads((model / "config.json").read_text())
    del content["eos_token_id"]
    (model / "config.json").write_text(json.dumps({**content, **config}))
    if generation is not None:
        (model / "generation_config.json").write_text(json.dumps(generation))
    settings = ModelConfig(path=str(model), override_config=override)
    spec = ModelSpec(settings, str(model), torch.device("cpu"))
    assert sorted(spec.eos_token_ids) == sorted([2, *expected])
