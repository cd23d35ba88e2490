"""Two ranks under FSDP2 make the steps of one process, whichever optimiser makes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from data.protocol import DataProto
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
from workers.model.muon import matrices_and_others
from workers.model.optimizer import build_optimizer

pytestmark = pytest.mark.long
STEPS = 3
MUON = {"lr": 1e-2}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Muon": MUON,
    "SGD": {"lr": 0.1, "override_optimizer_config": {"momentum": 0.9}},
    "RMSprop": {},
    "own.py:Means": {"lr": 1e-2, "weight_decay": 0.01},
    "own.py:Norms": {"lr": 1e-2, "weight_decay": 0.01},
}
REFUSED = ("Adafactor", "Rprop", "own.py:Reads", "own.py:Peaks")
# Optimisers that look at whole matrices: by tensors, which is right on several ranks, and by
# numbers, which are those of a rank's own rows.
OWN = """
import torch


class Own(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * self.direction(parameter.grad)


class Means(Own):
    def direction(self, grad):
        if grad.ndim < 2:
            return grad
        squares = grad.square()
        rows = squares.mean(dim=1, keepdim=True)
        columns = squares.mean(dim=0, keepdim=True)
        return grad / ((rows @ columns / (rows.mean() + 1e-12)).sqrt() + 1e-4)


class Norms(Own):
    def direction(self, grad):
        return grad / (grad.norm() + 1e-6).clamp(min=1e-3)


class Reads(Own):
    def direction(self, grad):
        return grad / (grad.norm().item() + 1e-6)


class Peaks(Own):
    def direction(self, grad):
        return grad / (float(grad.abs().max()) + 1e-6)
"""


def step_with_each(folder: str, number: int, world: int, port: int, kind: str) -> None:
    """Makes updates with each optimiser on this rank's rows; rank 0 writes the weights' changes."""
    device = join_ranks(number, world, port, kind)
    data = make_update().pad_with_dummies(2).chunk(world)[number]
    changes: dict[str, Any] = {}
    for name, settings in OPTIMIZERS.items():
        optim = OptimConfig(**{"lr": 1e-3, "optimizer": own(folder, name), **settings})
        changes[name] = updates(folder, device, data, optim)
    muon = OptimConfig(optimizer="Muon", **MUON)
    with unrounded():
        changes["Muon in float32"] = updates(folder, device, data, muon)
    if world == 1:
        changes["Muon, nudged"] = updates(folder, device, data, muon, nudge=1e-7)
    for name in REFUSED:
        module, _ = build(folder, "actor", device)
        try:
            build_optimizer(module, OptimConfig(optimizer=own(folder, name)))
            changes[name] = ""
        except ValueError as error:
            changes[name] = str(error)
    if number == 0:
        torch.save(changes, Path(folder) / f"changes-{world}.pt")
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def own(folder: str, name: str) -> str:
    return f"{folder}/{name}" if ":" in name else name


def updates(
    folder: str, device: torch.device, data: DataProto, optim: OptimConfig, nudge: float = 0.0
) -> dict[str, Tensor]:
    """Returns the weights' changes; `nudge` is added as noise, of the largest, to gradients."""
    module, _ = build(folder, "actor", device)
    optimizer = build_optimizer(module, optim)
    if nudge:
        generator = torch.Generator().manual_seed(0)
        matrices, _ = matrices_and_others(module)

        def nudge_gradients(*_: Any) -> None:
            for matrix in matrices:
                grad = matrix.grad
                assert grad is not None
                noise = torch.randn(grad.shape, generator=generator)
                grad += nudge * grad.abs().max() * noise

        optimizer.register_step_pre_hook(nudge_gradients)
    actor = DataParallelPPOActor(
        ActorConfig(ppo_micro_batch_size_per_gpu=1),
        module,
        optimizer,
        forward=ForwardSettings(device=device),
    )
    before = whole_weights(module)
    for _ in range(STEPS):
        actor.update_policy(data)
    return change(before, module)


@contextmanager
def unrounded() -> Iterator[None]:
    """Keeps float32 in the block where torch's Muon rounds a gradient to bfloat16."""
    with mock.patch.object(Tensor, "bfloat16", lambda tensor: tensor.clone()):
        yield


@pytest.fixture(scope="module")
def changes(tiny_task: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one process and two ranks made of the same weights."""
    folder = tmp_path_factory.mktemp("optimizers")
    (folder / "model").symlink_to(tiny_task / "model")
    (folder / "own.py").write_text(OWN)
    for world in (1, 2):
        spawn_ranks(step_with_each, str(folder), world, "cpu")
    return [torch.load(folder / f"changes-{world}.pt") for world in (1, 2)]


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"Muon"}))
def test_two_ranks_make_the_steps_of_one(changes: list[dict[str, Any]], name: str) -> None:
    """What is next to zero in a gradient is rounding, and AdamW's step of it as large as others."""
    one, two = (made[name] for made in changes)
    limits = {"SGD": 1e-5, "own.py:Means": 1e-4, "own.py:Norms": 1e-4}
    assert largest_difference(one, two) < limits.get(name, 1e-3)


def test_two_ranks_make_the_steps_of_one_by_muon(changes: list[dict[str, Any]]) -> None:
    """Whole matrices are made orthogonal, not a rank's rows: in float32 nothing differs."""
    one, two = (made["Muon in float32"] for made in changes)
    assert largest_difference(one, two) < 1e-4


def test_muon_on_two_ranks_differs_by_what_its_rounding_makes_of_noise(
    changes: list[dict[str, Any]],
) -> None:
    """Muon rounds gradients to bfloat16 and makes their smallest directions as large as others.

    These gradients have hardly any: noise of 1e-7 on one rank moves as much as a second rank.
    """
    one, two = (made["Muon"] for made in changes)
    noise = largest_difference(one, changes[0]["Muon, nudged"])
    assert noise > 0.05
    assert largest_difference(one, two) < 3 * noise


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_right_step_of_shared_parameters_is_refused(
    changes: list[dict[str, Any]], name: str
) -> None:
    one, two = (made[name] for made in changes)
    assert one == ""
    assert "train on one rank, or take AdamW or Muon" in two
    if name.startswith("own.py:"):
        assert "on 2 ranks its step differs from one rank's" in two and ".full_tensor()" in two
    else:
        assert "takes no parameters that several ranks share" in two
