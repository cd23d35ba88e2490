"""A sampler of a user's that learns from what happened: it is told, asked late, and kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from data.array_ops import object_array
from data.epoch_order import EpochOrder
from data.learning_sampler import OUTCOMES, GroupOutcome, LearningSampler
from data.protocol import DataProto
from tests.e2e.test_agents import game_config
from tests.e2e.test_training import tiny_config, train
from training.building import build_trainer
from training.config.loader import ConfigError
from training.run.checkpoint_contents import load_driver_state
from training.run.data_position import DataPosition, RowStream

SOURCE = """
from torch.utils.data import Sampler

class Own(Sampler):
    def __init__(self, data_source, data_config):
        self.dataset, self.told, self.given = data_source, [], []

    def __len__(self):
        return len(self.dataset)

    def __iter__(self):
        for row in range(len(self.dataset)):
            self.given.append((row, len(self.told)))
            yield row

    def update(self, batch):
        self.told.append(float(batch.batch["token_level_scores"].sum()))
        self.played = [int(task) for task in batch.non_tensor_batch["task_index"]]
        self.outcomes = batch.meta_info["outcomes"]

    def state_dict(self):
        return {"told": list(self.told)}

    def load_state_dict(self, state):
        self.told = list(state["told"])
"""


class Draws(Sampler[int]):
    """Draws from torch's generator, as its own samplers do, or gives a row that it was told."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.next: list[int] = []

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.rows):
            drawn = int(torch.randint(self.rows, (1,)))
            yield self.next.pop() if self.next else drawn

    def update(self, batch: DataProto) -> None:
        self.next.append(int(batch.meta_info["hard"]))


def order_of(inner: Any, skip: int = 0) -> EpochOrder:
    order = EpochOrder(range(8), seed=1, shuffle=False, inner=inner)
    order.start(epoch=0, skip=skip)
    return order


def test_a_row_is_asked_for_when_it_is_drawn() -> None:
    inner = Draws(8)
    order = order_of(inner)
    rows = iter(order)
    plain = list(order_of(Draws(8)))
    assert [next(rows), next(rows)] == plain[:2]
    order.update(DataProto(meta_info={"hard": 77}))
    assert next(rows) == 77
    # What it would have drawn there is drawn all the same.
    assert list(rows) == plain[3:]


def test_others_draws_and_its_own_do_not_mix() -> None:
    expected = list(order_of(Draws(8)))
    rows = []
    before = torch.get_rng_state()
    for row in order_of(Draws(8)):
        rows.append(row)
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(3)
        before = torch.get_rng_state()
    assert rows == expected
    assert list(order_of(Draws(8), skip=3)) == expected[3:]


class Told(LearningSampler):
    """Gives its own tasks, and keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        yield from range(self.skip, 8)

    def start(self, epoch: int, skip: int) -> None:
        self.skip = skip
        self.calls.append(("start", epoch, skip))

    def begin_draw(self, step: int, so_far: Sequence[GroupOutcome]) -> None:
        self.calls.append(("draw", step, [outcome.task for outcome in so_far]))

    def take_back(self, step: int, tasks: Sequence[int]) -> None:
        self.calls.append(("take_back", step, list(tasks)))

    def update(self, batch: DataProto) -> None:
        self.calls.append(("update", batch.meta_info[OUTCOMES]))


def stream_of(sampler: LearningSampler) -> RowStream:
    order = EpochOrder(range(8), seed=1, shuffle=False, inner=sampler)

    def collate(rows: list[int]) -> dict[str, Any]:
        return {"row": np.array(rows), "task_index": np.array(["a user's"] * len(rows))}

    loader = DataLoader(list(range(8)), 4, sampler=order, collate_fn=collate, drop_last=True)
    return RowStream(loader, order, rows_per_step=4, batch_size=4)


def test_a_learning_sampler_is_told_the_place_the_step_and_what_came_so_far() -> None:
    sampler = Told()
    stream = stream_of(sampler)
    stream.seek(DataPosition(epoch=2, rows_done=4))
    rows = stream.draw(7)
    assert rows["row"].tolist() == rows["task_index"].tolist() == [4, 5, 6, 7]
    assert rows["own_task_index"].tolist() == ["a user's"] * 4
    again = stream.draw(7, so_far=[GroupOutcome(task=5)])
    assert again["row"].tolist() == [0, 1, 2, 3]
    assert sampler.calls == [
        ("draw", 7, []),
        ("start", 2, 4),
        ("draw", 7, [5]),
        ("start", 3, 0),
    ]


def test_a_step_in_flight_is_told_by_its_groups_and_an_update_by_its_outcomes() -> None:
    sampler = Told()
    stream = stream_of(sampler)
    in_flight = DataProto.from_dict(
        non_tensors={
            "uid": object_array(["3.0", "3.0", "3.1", "3.1"]),
            "task_index": np.array([6, 6, 2, 2]),
        },
        meta_info={"global_steps": 3},
    )
    stream.take_back(in_flight)
    stream.learn(in_flight, [GroupOutcome(task=6)])
    assert sampler.calls == [
        ("take_back", 3, [6, 2]),
        ("update", [GroupOutcome(task=6)]),
    ]
    assert OUTCOMES not in in_flight.meta_info


def test_rows_of_other_samplers_have_no_number_of_a_task() -> None:
    order = EpochOrder(range(8), seed=1, shuffle=False)
    loader = DataLoader(list(range(8)), 4, sampler=order, collate_fn=lambda rows: {"row": rows})
    stream = RowStream(loader, order, rows_per_step=4, batch_size=4)
    assert stream.draw(1).keys() == {"row"}


@pytest.mark.seconds
def test_a_run_tells_its_sampler_of_each_step_and_keeps_what_it_learnt(
    tiny_task: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(SOURCE)
    words = (
        f"data.sampler.class_path={tmp_path}/own.py",
        "data.sampler.class_name=Own",
        "data.dataloader_num_workers=2",
        "trainer.save_freq=1",
        "trainer.val_before_train=false",
        "data.val_files=null",
    )
    config = tiny_config(tiny_task, tmp_path / "run", *words)
    sampler: Any = train(config).row_stream.order.inner
    assert len(sampler.told) == 2
    # The second step's rows were drawn when the first step's rewards were known.
    assert [known for _, known in sampler.given] == [0] * 8 + [1] * 8
    assert sorted(sampler.played) == list(range(8, 16)), "the rows of the step that was made"
    assert {outcome.task: len(outcome.rewards) for outcome in sampler.outcomes} == dict.fromkeys(
        range(8, 16), 1
    )
    state = load_driver_state(tmp_path / "run/global_step_2")
    assert state.sampler == {"told": sampler.told}
    more = tiny_config(tiny_task, tmp_path / "run", *words, "trainer.total_training_steps=3")
    resumed: Any = train(more).row_stream.order.inner
    assert resumed.told[:2] == sampler.told and len(resumed.told) == 3
    assert [row for row, known in resumed.given] == list(range(24))


BACKWARDS = """
class Backwards:
    def __init__(self, data_source, data_config):
        self.dataset = data_source

    def __iter__(self):
        return iter(range(len(self.dataset) - 1, -1, -1))

    def __len__(self):
        return len(self.dataset)
"""


def test_a_sampler_of_ones_own_orders_the_tasks_of_an_environment(
    tiny_game: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(BACKWARDS)
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"level": {row}}}\n' for row in range(20)))
    words = (f"data.sampler.class_path={tmp_path}/own.py", "data.sampler.class_name=Backwards")
    rows = f"data.train_files={tmp_path}/tasks.jsonl"
    trainer = build_trainer(game_config(tiny_game, tmp_path / "run", *words, rows))
    drawn = trainer.row_stream.draw(1)
    assert [task["level"] for task in drawn["task"]] == list(range(19, 11, -1))
    with pytest.raises(ConfigError, match="gives the order of rows, and the environment plays"):
        game_config(tiny_game, tmp_path / "run", *words)
