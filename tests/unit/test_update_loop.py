"""The update's loop: what each setting of its section does to mini-batches and steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from data.protocol import DataProto
from training.config import ActorConfig
from training.core_algos import GlobalBatchInfo
from workers.model import update_loop
from workers.model.mini_batches import rows_of_updates
from workers.model.update_loop import MicroLoss, UpdateLoop


class Squares(UpdateLoop):
    """Learns one weight, with the loss weight x the sum of rows' numbers."""

    name = "actor"

    def micro_loss(self, micro: DataProto, inputs: Any, counts: GlobalBatchInfo) -> MicroLoss:
        loss = self.module.weight.sum() * micro.batch["number"].sum()
        return MicroLoss(loss, {"actor/pg_loss": loss.detach()})


def loop_of(monkeypatch: pytest.MonkeyPatch, config: ActorConfig) -> Squares:
    """Makes a loop whose micro-batches are its mini-batches."""

    def whole(data: DataProto, *_: Any) -> Any:
        yield torch.arange(len(data)), data, None

    monkeypatch.setattr(update_loop, "iter_micro_batches", whole)
    module = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(0.0)
    return Squares(config, module, torch.optim.SGD(module.parameters(), lr=1.0), None)


def batch(numbers: list[float]) -> DataProto:
    size = len(numbers)
    data = DataProto.from_dict(
        tensors={
            "number": torch.tensor(numbers),
            "response_mask": torch.ones(size, 1),
            "attention_mask": torch.ones(size, 2),
        },
        non_tensors={"uid": np.array([str(row) for row in range(size)], dtype=object)},
    )
    data.meta_info = {"seed": 3, "global_steps": 2}
    return data


@pytest.mark.parametrize(("grad_clip", "moved"), [(100.0, 3.0), (0.5, 0.5)])
def test_grad_clip_bounds_the_norm_that_a_step_takes(
    monkeypatch: pytest.MonkeyPatch, grad_clip: float, moved: float
) -> None:
    loop = loop_of(monkeypatch, ActorConfig(grad_clip=grad_clip))
    metrics = loop.update(batch([1.0, 2.0]), None)
    assert loop.module.weight.item() == pytest.approx(-moved, rel=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, [4]),
        ({"ppo_epochs": 3}, [4, 4, 4]),
        ({"ppo_mini_batch_size": 2}, [2, 2]),
        ({"ppo_mini_batch_size": 1, "ppo_epochs": 2}, [1] * 8),
    ],
)
def test_ppo_epochs_and_ppo_mini_batch_size_cut_a_batch_into_updates(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], sizes: list[int]
) -> None:
    loop = loop_of(monkeypatch, ActorConfig(**settings))
    steps: list[int] = []
    step = loop._step
    monkeypatch.setattr(loop, "_step", lambda *a, **k: (steps.append(1), step(*a, **k)))
    loop.update(batch([0.0] * 4), None)
    assert len(steps) == len(sizes)
    rows = rows_of_updates(batch([0.0] * 4), loop.default_plan(4))
    assert [len(numbers) for numbers in rows] == sizes


def test_shuffle_permutes_the_groups_before_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def orders(**settings: Any) -> list[list[int]]:
        loop = loop_of(monkeypatch, ActorConfig(ppo_epochs=2, **settings))
        rows: list[Tensor] = rows_of_updates(batch([0.0] * 8), loop.default_plan(8))
        return [numbers.tolist() for numbers in rows]

    assert orders() == [list(range(8))] * 2
    first, second = orders(shuffle=True)
    assert sorted(first) == sorted(second) == list(range(8)) and first != second


@pytest.mark.parametrize(
    ("mode", "divisor"),
    [("token-mean", 6), ("token-sum", 1), ("seq-mean-token-sum", 3), ("seq-mean-token-mean", 3)],
)
def test_loss_agg_mode_divides_the_sum_of_finished_groups(
    monkeypatch: pytest.MonkeyPatch, mode: Any, divisor: int
) -> None:
    """Groups of four and two tokens, in two rows and one."""
    loop = loop_of(monkeypatch, ActorConfig(loss_agg_mode=mode, grad_clip=1e9))
    for numbers in ([1.0, 2.0], [3.0]):
        group = batch(numbers)
        group.batch["response_mask"] = torch.ones(len(numbers), 2)
        loop.add_groups(group)
    metrics = loop.finish_update()
    assert loop.module.weight.item() == pytest.approx(-6 / divisor)
    assert metrics["actor/grad_norm"] == pytest.approx(6 / divisor)


def test_nothing_to_learn_from_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_of(monkeypatch, ActorConfig())
    empty = batch([1.0, 2.0])
    empty.batch["response_mask"] = torch.zeros(2, 1)
    loop.update(empty, None)
    assert loop.module.weight.item() == 0
