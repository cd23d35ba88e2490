"""A run that goes on with another optimizer or model is told which setting changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.test_checkpoint import save, step, trained
from training.config import OptimConfig, PPOConfig
from training.config.loader import load_config
from training.run.checkpoint_folders import CannotResume
from training.run.recorded_config import record_config
from training.run.resume_changes import refusing_what_does_not_fit
from workers.model import state as model_state
from workers.model.checkpoint_reader import DoesNotFit
from workers.model.optimizer import build_scheduler

# A run's workers silence it: a single rank saves by itself.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PARTS = ("model", "optimizer", "extra")


def sgd(seed: int) -> model_state.State:
    module = trained(seed)[0]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return module, optimizer, build_scheduler(optimizer, OptimConfig(lr=0.1), 10)


def wider() -> model_state.State:
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    return module, optimizer, build_scheduler(optimizer, OptimConfig(lr=0.1), 10)


def config(*changes: str) -> PPOConfig:
    return load_config(["configs/quickstart.yaml", *changes], check=False).config


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    original = trained(0)
    step(*original)
    save(tmp_path / "global_step_4/actor", original, PARTS)
    save(tmp_path / "global_step_4/critic", original, PARTS)
    record_config(tmp_path, config(), 0)
    return tmp_path / "global_step_4"


@pytest.mark.parametrize(
    ("part", "state", "changed", "told"),
    [
        (
            "actor",
            sgd(1),
            "actor_rollout_ref.actor.optim.optimizer=SGD",
            r"actor\.optim\.optimizer was 'AdamW', and is 'SGD'\. Set it back, or let the optim.*"
            r"resume_with_changes=true \(.*another optimizer: 9 tensors",
        ),
        (
            "critic",
            sgd(1),
            "critic.optim.optimizer=SGD",
            r"run: critic\.optim\.optimizer was 'AdamW', and is 'SGD'\. ",
        ),
        (
            "actor",
            wider(),
            "actor_rollout_ref.model.lora_rank=8",
            r"run: actor_rollout_ref\.model\.lora_rank was 0, and is 8\. Set it back; a run with .*"
            r"trainer\.default_local_dir.*another model: 3 tensors",
        ),
        ("actor", wider(), "trainer.project_name=other", "no setting recorded beside it tells"),
    ],
)
def test_the_setting_that_changed_is_named_with_a_fix(checkpoint, part, state, changed, told):
    refuses = pytest.raises(CannotResume, match=told)
    with refuses as refused, refusing_what_does_not_fit(checkpoint, 4, config(changed)):
        model_state.load(checkpoint / part, state, PARTS)
    assert "project_name" not in str(refused.value)


def test_a_run_without_recorded_settings_is_refused_in_plain_words_too(checkpoint: Path) -> None:
    (checkpoint.parent / "config.yaml").unlink()
    refuses = pytest.raises(CannotResume, match="another optimizer")
    with refuses, refusing_what_does_not_fit(checkpoint, 4, config()):
        model_state.load(checkpoint / "actor", sgd(1), PARTS)


def test_a_part_that_was_not_saved_is_to_be_mended_by_the_user(checkpoint: Path) -> None:
    (checkpoint / "actor/scheduler.json").unlink()
    refuses = pytest.raises(CannotResume, match="holds no 'extra'")
    with refuses, refusing_what_does_not_fit(checkpoint, 4, config()):
        model_state.load(checkpoint / "actor", trained(1), PARTS)


def test_another_optimizer_begins_with_a_state_of_its_own_where_that_is_said(
    checkpoint, caplog
) -> None:
    state = sgd(1)
    model_state.load(checkpoint / "actor", state, PARTS, other_optimizer=True)
    assert "actor/optimizer is of another optimizer than SGD, which begins" in caplog.text
    assert not state[1].state
    saved = trained(0)
    step(*saved)
    for a, b in zip(saved[0].parameters(), state[0].parameters(), strict=True):
        assert torch.equal(a, b), "the weights are the saved ones"
    assert state[2].last_epoch == 1
    step(*state)
    with pytest.raises(DoesNotFit, match="another model"):
        model_state.load(checkpoint / "actor", wider(), PARTS, other_optimizer=True)
