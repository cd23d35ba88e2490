"""Probes on two ranks: their sums, and one that raises, or measures otherwise, on a single rank."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from tests.processes.test_ranks import join_ranks, spawn_ranks
from workers.model.forward_settings import ForwardSettings
from workers.model.probe import FAULTS, Measured, TrainedModel, UpdateProbe
from workers.model.probe_set import UpdateProbes


class Numbered(UpdateProbe):
    """Measures the rank's number."""

    def __init__(self, rank: int) -> None:
        self.rank = float(rank)

    def take(self) -> Measured:
        number = torch.tensor(self.rank)
        return Measured(sums={"sum": number + 1}, maxima={"largest": number}, record=self.rank)


class RaisesOnOne(Numbered):
    """Raises on the second rank, in the midst of an update."""

    def after_step(self, model: TrainedModel, outcome: Any) -> None:
        if self.rank == 1:
            raise ZeroDivisionError("a fault of the second rank")


class NamesOthers(UpdateProbe):
    """Measures under another name on each rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def take(self) -> Measured:
        return Measured(sums={f"of rank {self.rank}": torch.tensor(1.0)})


def run_rank(folder: str, number: int, world: int, port: int, kind: str) -> None:
    join_ranks(number, world, port, kind)
    os.environ.pop(FAULTS, None)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("workers.model.probe_set").addHandler(handler)
    probes = UpdateProbes([Numbered(number), RaisesOnOne(number), NamesOthers(number)])
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = TrainedModel("actor", module, optimizer, ForwardSettings())
    taken = []
    for _ in range(2):
        probes.after_step(model, "made")
        taken.append(probes.take(1))
    records = probes.take_records()
    torch.save((taken, records, said), Path(folder) / f"{number}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_ranks_sum_up_what_they_measured_and_lose_a_probe_together(tmp_path: Path) -> None:
    spawn_ranks(run_rank, str(tmp_path), 2, "cpu")
    for number in (0, 1):
        taken, records, said = torch.load(tmp_path / f"{number}.pt")
        assert taken == [{"sum": 3.0, "largest": 1.0}] * 2
        assert records == {"Numbered": float(number)}
        assert len(said) == (2 if number == 0 else 0), "the first rank alone says it, once"
        if number == 0:
            assert "probe RaisesOnOne" in said[0] and "a fault of the second rank" in said[0]
            assert "probe NamesOthers" in said[1] and "measured different metrics" in said[1]
