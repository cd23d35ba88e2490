"""What features add to a step's rows, and keep beside the policy: opened, asked, saved and read."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data.protocol import DataProto
from tests.unit.test_actor_critic import make_update
from training import step_additions
from training.config import ActorConfig, OptimConfig
from training.step_additions import StepAddition, add_all, ask
from workers.model import companion as companions
from workers.model import state as model_state
from workers.model.checkpoint_reader import DoesNotFit
from workers.model.checkpoint_writer import CheckpointWriter
from workers.model.companion import ASKED, Companion, open_companions
from workers.model.optimizer import build_scheduler


class Twice(StepAddition):
    name = "twice"

    def add(self, rows: DataProto, policy: Any) -> tuple[DataProto, dict[str, float]]:
        rows = rows.select()
        rows.batch["advantages"] = 2 * rows.batch["advantages"]
        return rows, {f"added/{self.name}": float(len(ask(policy, "mine", rows)))}


class Policy:
    """Answers with the rows that it was asked about."""

    asked: str = ""

    def ask_companion(self, data: DataProto) -> DataProto:
        self.asked = data.meta_info[ASKED]
        return data


def test_additions_come_in_order_in_a_copy_and_are_timed() -> None:
    data = make_update()
    before = data.batch["advantages"].clone()
    meta = dict(data.meta_info)
    timed: list[str] = []

    def timer(name: str) -> Any:
        timed.append(name)
        return nullcontext()

    policy: Any = Policy()
    rows, metrics = add_all([Twice(), Twice()], data, policy, timer)
    assert torch.equal(rows.batch["advantages"], 4 * before)
    assert torch.equal(data.batch["advantages"], before) and data.meta_info == meta
    assert timed == ["twice", "twice"] and metrics == {"added/twice": 7.0}
    assert policy.asked == "mine"
    same, nothing = add_all([], data, policy, timer)
    assert same is data and nothing == {}


def test_what_a_config_does_not_ask_for_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"a": None, "b": Twice()}
    monkeypatch.setattr(step_additions, "named", lambda attribute: [(n, n) for n in made])
    monkeypatch.setattr(step_additions, "load_object", lambda place, what: lambda *_: made[place])
    config: Any = None
    assert step_additions.open_step_additions(config, None) == [made["b"]]


class Kept(Companion):
    name = "kept"

    def __init__(self) -> None:
        self.numbers = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}

    def read(self, data: DataProto) -> DataProto:
        return data

    def tensors(self) -> dict[str, Tensor]:
        return self.numbers


def test_two_companions_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = None
    monkeypatch.setattr(companions, "load_object", lambda place, what: lambda *_: Kept())
    monkeypatch.setattr(companions, "named", lambda attribute: [("one", "x:y")])
    assert list(open_companions(config, None)) == ["kept"]
    monkeypatch.setattr(companions, "named", lambda attribute: [("one", "x:y"), ("two", "x:y")])
    with pytest.raises(ValueError, match="the companion kept of feature two has the name of"):
        open_companions(config, None)


def test_what_a_companion_keeps_is_read_back_bitwise_in_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = (module, optimizer, build_scheduler(optimizer, OptimConfig(), 10))
    writer = CheckpointWriter()
    kept = Kept()
    beside = {"kept": kept.tensors(), "empty": {}}
    model_state.save(writer, tmp_path / "one", state, ("model",), beside=beside)
    assert writer.is_written(wait=True)
    assert [each.name for each in (tmp_path / "one/beside").iterdir()] == ["kept"]
    again = Kept()
    for tensor in again.numbers.values():
        tensor.zero_()
    places = {name: tensor.data_ptr() for name, tensor in again.numbers.items()}
    assert model_state.load_beside(tmp_path / "one", "kept", again.tensors())
    for name, tensor in again.numbers.items():
        assert torch.equal(tensor, kept.numbers[name]) and tensor.data_ptr() == places[name]
    assert model_state.load_beside(tmp_path / "one", "empty", {})
    with pytest.raises(DoesNotFit, match="was saved by another model"):
        model_state.load_beside(tmp_path / "one", "kept", {"a": torch.zeros(4)})
    # A checkpoint that knows nothing of it.
    model_state.save(writer, tmp_path / "two", state, ("model",))
    assert writer.is_written(wait=True)
    with caplog.at_level(logging.WARNING):
        assert not model_state.load_beside(tmp_path / "two", "kept", again.tensors())
    assert "holds no beside/kept" in caplog.text


def test_an_update_is_told_to_companions_behind_it() -> None:
    from workers.training_worker import TrainingWorker

    told: list[str] = []

    class Tells(Kept):
        def updated(self) -> None:
            told.append("updated")

    worker: Any = TrainingWorker.__new__(TrainingWorker)
    module = nn.Linear(2, 2)
    worker.model, worker.section = module, ActorConfig()
    worker.device = torch.device("cpu")
    worker.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    worker.scheduler = build_scheduler(worker.optimizer, OptimConfig(), 10)
    worker.writer = CheckpointWriter()
    worker.config = SimpleNamespace(trainer=SimpleNamespace(deterministic=False))
    worker.companions = {"kept": Tells()}
    metrics = worker._update("actor", lambda: told.append("update") or {})
    assert told == ["update", "updated"] and "actor/lr" in metrics
