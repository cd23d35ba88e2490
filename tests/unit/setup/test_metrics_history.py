"""An epoch's entry of `metrics_history`."""

from __future__ import annotations

import json
from pathlib import Path

from setup.metrics_history import epoch_entry, recorded_steps


def test_the_steps_of_a_run_are_read_from_its_folder_where_all_are_there(tmp_path: Path) -> None:
    assert recorded_steps(tmp_path, 2) == []
    lines = [{"step": 0, "val/score": 1.0}]
    for step in (1, 2, 3):
        lines.append({"step": step, "training/global_step": step, "actor/pg_loss": 0.5 * step})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [step["actor/pg_loss"] for step in recorded_steps(tmp_path, 2)] == [0.5, 1.0]
    assert recorded_steps(tmp_path, 0) == recorded_steps(tmp_path, 4) == []


def test_an_entry_has_the_means_of_those_steps_that_have_a_metric() -> None:
    steps = [
        {"actor/pg_loss": 1.0, "critic/score/mean": 2.0},
        {"actor/pg_loss": 3.0, "val/score": 5.0},
    ]
    entry = epoch_entry(4, steps)
    assert entry["epoch"] == 4
    assert entry["iterations"] == 2
    assert entry["policy_loss"] == 2.0
    assert entry["reward"] == 2.0
    assert entry["value_loss"] is None
    assert entry["all"] == {"actor/pg_loss": 2.0, "critic/score/mean": 2.0, "val/score": 5.0}
