"""Which probes of the alarms a run opens."""

from __future__ import annotations

from tests.unit.config.helpers import load
from training.config import PPOConfig
from workers.model.probes_of_run import open_probes, open_read_probes


def test_alarms_that_are_off_measure_nothing() -> None:
    watched = PPOConfig()
    off = load("alarms.mode=off")
    assert len(open_probes(watched, "actor")) > len(open_probes(watched, "critic")) > 3
    assert len(open_probes(watched, "actor")) > len(open_probes(off, "actor")) + 3
    assert len(open_probes(watched, "critic")) > len(open_probes(off, "critic")) + 3
    assert len(open_read_probes(watched, "ref")) == 1
    assert open_read_probes(off, "ref") == []
