"""Writing beside the run: in order, and a disk that hangs holds nobody up for long."""

from __future__ import annotations

import threading

import pytest

from features.records import background_writer
from features.records.background_writer import MOST_WAITING, BackgroundWriter


def test_jobs_are_done_in_their_order() -> None:
    writer = BackgroundWriter()
    assert writer.flush(), "nothing is to be done"
    done: list[int] = []
    for number in range(50):
        assert writer.submit(lambda number=number: done.append(number))
    assert writer.flush() and done == list(range(50))


def test_a_job_that_hangs_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_writer, "WAIT_S", 0.05)
    writer = BackgroundWriter()
    hanging = threading.Event()
    writer.submit(hanging.wait)  # type: ignore[arg-type]
    taken = [writer.submit(lambda: None) for _ in range(MOST_WAITING + 1)]
    assert not taken[-1] and not writer.flush()
    hanging.set()
    monkeypatch.setattr(background_writer, "WAIT_S", 5.0)
    assert writer.flush()


def test_the_thread_ends_when_the_writer_is_closed_and_begins_again() -> None:
    before = set(threading.enumerate())
    writer = BackgroundWriter()
    written: list[int] = []
    writer.submit(lambda: written.append(1))
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["records"]
    assert writer.close() and writer.close()
    assert not set(threading.enumerate()) - before
    writer.submit(lambda: written.append(2))
    assert writer.close()
    assert written == [1, 2]
