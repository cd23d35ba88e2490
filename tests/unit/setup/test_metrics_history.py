"""An epoch's entry of `metrics_history`."""

from __future__ import annotations

from setup.metrics_history import epoch_entry


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
