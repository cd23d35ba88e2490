"""The alarms go on from the state that an older checkpoint has of them."""

from __future__ import annotations

from tests.unit.test_observers import make_run
from training.observers_of_run import open_observers


def test_an_older_state_of_the_alarms_is_read() -> None:
    observers = open_observers(make_run())
    observers.load_state_dict({"alarms": {"template": "abc", "rewards": {}, "fewest_cut": 0.5}})
    assert observers.state_dict()["alarms"]["lengths"]["fewest_cut"] == 0.5


def test_alarms_that_are_off_open_no_observer() -> None:
    assert "alarms" in open_observers(make_run()).named
    assert "alarms" not in open_observers(make_run("alarms.mode=off")).named
