"""Two ranks under FSDP2 make the steps of one process, whichever optimiser makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes.test_ranks import (
    build,
    change,
    join_ranks,
    largest_difference,
    spawn_ranks,
    whole_weights,
)
from tests.unit.test_actor_critic import make_update
from training.config import ActorConfig, OptimConfig
from workers.dp_actor import DataParallelPPOActor
from workers.model.forward_settings import ForwardSettings
from workers.model.optimizer import build_optimizer

pytestmark = pytest.mark.long
STEPS = 3
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Muon": {"lr": 1e-2},
    "SGD": {"lr": 0.1, "override_optimizer_config": {"momentum": 0.9}},
}


def step_with_each(folder: str, number: int, world: int, port: int, kind: str) -> None:
    """Makes updates with each optimiser on this rank's rows; rank 0 writes the weights' changes."""
    device = join_ranks(number, world, port, kind)
    data = make_update().pad_with_dummies(2).chunk(world)[number]
    changes: dict[str, Any] = {}
    for name, settings in OPTIMIZERS.items():
        module, _ = build(folder, "actor", device)
        optim = OptimConfig(**{"lr": 1e-3, "optimizer": name, **settings})
        actor = DataParallelPPOActor(
            ActorConfig(ppo_micro_batch_size_per_gpu=1),
            module,
            build_optimizer(module, optim),
            forward=ForwardSettings(device=device),
        )
        before = whole_weights(module)
        for _ in range(STEPS):
            actor.update_policy(data)
        changes[name] = change(before, module)
    module, _ = build(folder, "actor", device)
    try:
        build_optimizer(module, OptimConfig(optimizer="Adafactor"))
        changes["Adafactor"] = ""
    except ValueError as error:
        changes["Adafactor"] = str(error)
    if number == 0:
        torch.save(changes, Path(folder) / f"changes-{world}.pt")
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def changes(tiny_task: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one process and two ranks made of the same weights."""
    folder = tmp_path_factory.mktemp("optimizers")
    (folder / "model").symlink_to(tiny_task / "model")
    for world in (1, 2):
        spawn_ranks(step_with_each, str(folder), world, "cpu")
    return [torch.load(folder / f"changes-{world}.pt") for world in (1, 2)]


def test_two_ranks_make_the_steps_of_one_by_sgd(changes: list[dict[str, Any]]) -> None:
    one, two = (made["SGD"] for made in changes)
    assert largest_difference(one, two) < 1e-5


def test_two_ranks_make_the_steps_of_one_by_adamw(changes: list[dict[str, Any]]) -> None:
    """What is next to zero in a gradient is rounding, and AdamW's step of it as large as others."""
    one, two = (made["AdamW"] for made in changes)
    assert largest_difference(one, two) < 1e-3


@pytest.mark.xfail(reason="0.2 of the largest change after three steps; the cause is not known")
def test_two_ranks_make_the_steps_of_one_by_muon(changes: list[dict[str, Any]]) -> None:
    one, two = (made["Muon"] for made in changes)
    assert largest_difference(one, two) < 1e-5


def test_adafactor_is_refused_where_ranks_share_parameters(changes: list[dict[str, Any]]) -> None:
    one, two = (made["Adafactor"] for made in changes)
    assert one == "" and "takes no parameters that several ranks share" in two
