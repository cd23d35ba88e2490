"""Edits of the core, in place, train in silence: no instrument forbids them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from data.protocol import DataProto
from features.alarms.rules import update as update_rules
from tests.e2e.test_agents import game_config, playing
from tests.features.alarms.runs import silent_faults
from tests.features.alarms.runs.silent_faults import patched
from tests.features.alarms.runs.test_alarms import watch
from training import step_phases
from training.config import OptimConfig, UpdatePlan
from workers import training_worker
from workers.model import update_loop

SETTINGS = (
    "data.train_batch_size=32",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "trainer.total_training_steps=4",
    "alarms.mode=stop",
    *playing("Steady"),
)
KL_REWARD = ("algorithm.use_kl_in_reward=true",)


@pytest.fixture(autouse=True)
def undo() -> Iterator[None]:
    yield
    silent_faults.undo_patches()


def update_that_ends_early() -> None:
    """Three of four mini-batches are run, as where the KL has grown too large."""
    own = update_loop.rows_of_updates
    patched(update_loop, "rows_of_updates", lambda data, plan: own(data, plan)[:3])


def update_of_more_epochs() -> None:
    own = update_loop.rows_of_updates

    def twice(data: DataProto, plan: UpdatePlan) -> list[torch.Tensor]:
        return 2 * own(data, plan)

    patched(update_loop, "rows_of_updates", twice)


def best_and_worst_rows_alone() -> None:
    """Half of the rows are trained on, those of the highest and the lowest scores."""

    def halved(phases: Any, batch: DataProto, step: int) -> DataProto:
        order = batch.batch["token_level_scores"].sum(1).argsort()
        quarter = len(order) // 4
        return batch.select_idxs(torch.cat([order[:quarter], order[-quarter:]]))

    patched(step_phases.StepPhases, "resample", halved)


def kl_that_is_never_paid() -> None:
    """A negative KL adds nothing to the reward."""
    own = step_phases.apply_kl_penalty

    def clamped(data: DataProto, *args: Any) -> Any:
        result = own(data, *args)
        fields = data.batch
        scores = fields["token_level_scores"]
        fields["token_level_rewards"] = fields["token_level_rewards"].minimum(scores)
        return result

    patched(step_phases, "apply_kl_penalty", clamped)


def schedule_of_torch() -> None:
    def cosine(optimizer: Any, optim: OptimConfig, total_steps: int) -> Any:
        return lr_scheduler.CosineAnnealingLR(optimizer, total_steps)

    for module in (training_worker, update_rules):
        patched(module, "build_scheduler", cosine)


def rates_of_groups() -> None:
    """Vectors learn at a tenth of the rate, and stand first."""

    def grouped(module: torch.nn.Module, optim: OptimConfig) -> Any:
        parameters = list(module.parameters())
        vectors = [each for each in parameters if each.ndim < 2]
        others = [each for each in parameters if each.ndim >= 2]
        groups = [{"params": vectors, "lr": 0.1 * optim.lr}, {"params": others}]
        return torch.optim.AdamW(groups, lr=optim.lr)

    for module in (training_worker, update_rules):
        patched(module, "build_optimizer", grouped)


@pytest.mark.parametrize(
    ("edit", "settings"),
    [
        (update_that_ends_early, ()),
        (update_of_more_epochs, ()),
        (best_and_worst_rows_alone, ()),
        (kl_that_is_never_paid, KL_REWARD),
        (schedule_of_torch, ("actor_rollout_ref.actor.optim.scheduler=cosine",)),
        (rates_of_groups, ()),
    ],
)
def test_an_edit_in_place_rings_nothing(
    tiny_game: Path, tmp_path: Path, edit: Callable[[], None], settings: tuple[str, ...]
) -> None:
    edit()
    config = game_config(tiny_game, tmp_path, *SETTINGS, *settings)
    found = watch(config)
    assert len(found) == 4
    assert not any(found)
