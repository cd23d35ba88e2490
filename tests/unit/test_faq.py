"""The answers of docs/faq.md do what they say."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from data.loading import load_extern_object
from data.protocol import DataProto
from tests.conftest import PROJECT
from training.advantage import compute_advantage
from training.config import AlgorithmConfig
from training.core_algos import registry

PAGE = (PROJECT / "docs/faq.md").read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the page's files."""
    for name, source in re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.S):
        (tmp_path / name).write_text(source)
    return tmp_path


@pytest.mark.seconds
def test_a_template_of_ones_own_stands_in_a_copy_of_the_model(
    folder: Path, tiny_game: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = PROJECT / "data/chatml.jinja"
    words = ["own_template.py", str(tiny_game / "model"), str(template), str(folder / "copy")]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(folder / "own_template.py"), run_name="__main__")
    copy = AutoTokenizer.from_pretrained(folder / "copy")
    assert copy.chat_template == template.read_text()
    assert AutoTokenizer.from_pretrained(tiny_game / "model").chat_template != copy.chat_template
    assert (folder / "copy/model.safetensors").is_file()


def test_the_pages_optimiser_goes_downhill_by_signs(folder: Path) -> None:
    lion = load_extern_object(str(folder / "lion.py"), "Lion")
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = lion([weight], lr=0.1)
    for expected in ([0.9, -1.9], [0.8, -1.8]):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
        assert weight.tolist() == pytest.approx(expected)


def test_an_estimator_reads_what_environments_say_in_their_info(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "ADV_ESTIMATOR_REGISTRY", dict(registry.ADV_ESTIMATOR_REGISTRY))
    runpy.run_path(str(folder / "careful.py"))
    facts = np.empty(3, dtype=object)
    facts[:] = [{"info": {"risk": 1.0}}, {"info": {}}, {"info": {"risk": 0.0}}]
    scores = torch.tensor([[0.0, 3.0], [0.0, 0.0], [0.0, 0.0]])
    columns: dict[str, Any] = {
        "uid": np.array(["a", "a", "b"], dtype=object),
        "episode_id": np.array(["a0", "a1", "b0"], dtype=object),
        "episode_facts": facts,
    }
    mask = torch.ones(3, 2, dtype=torch.long)
    tensors = {"token_level_rewards": scores, "response_mask": mask, "responses": mask}
    batch = DataProto.from_dict(tensors=tensors, non_tensors=columns)
    found = compute_advantage(
        batch,
        "careful",
        gamma=1.0,
        lam=1.0,
        num_repeat=1,
        norm_adv_by_std_in_grpo=True,
        config=AlgorithmConfig(),
        state={},
    )
    # The mean is 1; the first one's 2 are halved.
    assert found.batch["advantages"].tolist() == [[1.0, 1.0], [-1.0, -1.0], [-1.0, -1.0]]
