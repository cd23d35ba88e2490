"""A run tells its observers everything in order, and is bitwise the same without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.protocol import DataProto
from tests.e2e.test_training import tiny_config
from training.building import build_trainer
from training.observers import Generations, Observer, RunStopped, StepReport

WATCHES = """
from training.observers import Observer

class Watches(Observer):
    tokens = 0

    def step_made(self, report):
        self.tokens += int(report.batch.batch["response_mask"].sum())
        return {"mine/tokens": float(self.tokens)}

    def wants_to_stop(self):
        if self.tokens < BUDGET:
            return None
        return f"{self.tokens} tokens", 7

    def state_dict(self):
        return {"tokens": self.tokens}

    def load_state_dict(self, state):
        self.tokens = state["tokens"]
"""


class Notes(Observer):
    """Notes what it is told, and what lies in the report."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.metrics: dict[str, float] = {}
        self.records: Sequence[Mapping[str, Any]] = ()

    def went_to(self, step: int, in_flight: Sequence[int]) -> None:
        self.told.append(("went_to", step, list(in_flight)))

    def run_started(self, step: int, in_flight: Sequence[int]) -> None:
        self.told.append(("run_started", step, list(in_flight)))

    def generation_begins(self, step: int, validate: bool) -> None:
        self.told.append(("generation_begins", step, validate))

    def played(self, batch: DataProto, step: int, validate: bool) -> None:
        assert "token_level_scores" not in batch.batch
        self.told.append(("played", step, validate))

    def generation_ends(self, step: int, validate: bool) -> None:
        self.told.append(("generation_ends", step, validate))

    def validation_begins(self, step: int) -> None:
        self.told.append(("validation_begins", step))

    def update_begins(self, batch: DataProto) -> None:
        self.told.append("update_begins")

    def scored(self, batch: DataProto, scores: Tensor) -> None:
        assert scores.shape == batch.batch["responses"].shape
        self.told.append("scored")

    def step_made(self, report: StepReport) -> None:
        self.metrics = dict(report.metrics)
        self.records = report.records
        self.told.append(("step_made", report.step))

    def validated(self, step: int, metrics: Mapping[str, float], generations: Generations) -> None:
        self.told.append(("validated", step, len(generations)))

    def checkpoint_saved(self, step: int) -> None:
        self.told.append(("checkpoint_saved", step))

    def step_logged(self, metrics: Mapping[str, float]) -> None:
        self.told.append(("step_logged", "val-core/guess_the_number/reward/mean@1" in metrics))

    def run_ended(self, error: BaseException | None) -> None:
        self.told.append(("run_ended", error))

    def closed(self) -> None:
        self.told.append("closed")


def generated(step: int, *, validate: bool) -> list[Any]:
    return [
        ("generation_begins", step, validate),
        ("played", step, validate),
        ("generation_ends", step, validate),
    ]


def test_a_run_tells_everything_in_order(tiny_task: Path, tmp_path: Path) -> None:
    notes = Notes()
    config = tiny_config(
        tiny_task, tmp_path, "trainer.save_freq=2", "trainer.log_val_generations=3"
    )
    trainer = build_trainer(config, observers=[notes])
    trainer.fit()
    trainer.shutdown()
    validation = [*generated(0, validate=True), "scored", ("validated", 0, 3)]
    update = ["update_begins", "scored"]
    last = [*generated(2, validate=True), "scored", ("validated", 2, 3)]
    assert notes.told == [
        ("went_to", 0, []),
        ("run_started", 0, []),
        ("validation_begins", 0),
        *validation,
        ("step_logged", True),
        *generated(1, validate=False),
        *update,
        ("step_made", 1),
        ("step_logged", False),
        *generated(2, validate=False),
        *update,
        ("step_made", 2),
        ("validation_begins", 2),
        *last,
        ("step_logged", True),
        ("checkpoint_saved", 2),
        ("run_ended", None),
        "closed",
    ]
    assert notes.metrics["training/global_step"] == 2
    # One rank of the policy, one of the critic.
    assert len(notes.records) == 2
    # Given observers stand in the place of the features'.
    assert not (tmp_path / "metrics.jsonl").exists()


def test_without_observers_a_run_is_bitwise_the_same(tiny_task: Path, tmp_path: Path) -> None:
    ends: list[dict[str, Tensor]] = []
    made: list[list[dict[str, float]]] = []
    for name in ("all", "none"):
        metrics: list[dict[str, float]] = []
        given: list[Observer] | None = None if name == "all" else []
        off = () if name == "all" else ("alarms.mode=off", "records.keep_gib=0")
        config = tiny_config(tiny_task, tmp_path / name, "trainer.deterministic=true", *off)
        trainer = build_trainer(config, observers=given)
        trainer.on_step = metrics.append  # type: ignore[method-assign, assignment]
        trainer.fit()
        worker: Any = trainer.actor_rollout_wg
        weights = worker.worker.module.state_dict()
        ends.append({key: value.clone() for key, value in weights.items()})
        made.append(metrics)
        trainer.shutdown()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    for watched, own in zip(made[0], made[1], strict=True):
        names = [name for name in own if not name.startswith(("timing", "perf/"))]
        assert {name: own[name] for name in names} == {name: watched[name] for name in names}


def test_a_users_observer_keeps_its_count_over_a_resume_and_ends_the_run(
    tiny_task: Path, tmp_path: Path
) -> None:
    file = tmp_path / "watch.py"
    file.write_text(f"BUDGET = 10**6\n{WATCHES}")
    run = tmp_path / "run"
    settings = (f"trainer.observers=[{file}:Watches]", "trainer.save_freq=1")
    trainer = build_trainer(tiny_config(tiny_task, run, *settings))
    tokens = trainer.fit()["mine/tokens"]
    trainer.shutdown()
    assert tokens > 0

    other = tmp_path / "other.py"
    other.write_text(f"BUDGET = {int(tokens) + 1}\n{WATCHES}")
    settings = (f"trainer.observers=[{other}:Watches]", "trainer.total_training_steps=9")
    trainer = build_trainer(tiny_config(tiny_task, run, *settings))
    with pytest.raises(RunStopped) as stopped:
        trainer.fit()
    assert trainer.global_steps == 3 and stopped.value.exit_code == 7
    trainer.shutdown()
