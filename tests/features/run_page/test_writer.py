"""When a page is written while a run goes on, and what happens where it cannot be."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from features.run_page.html import write_html
from features.run_page.run_folder import RunFolder
from features.run_page.writer import PageSchedule, PageWriter
from tests.features.run_page.made_runs import content_in, make_run, steps


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def written_times(cost: float, seconds: int) -> list[float]:
    """Returns when a page that costs so much is written in a run of so many seconds."""
    clock = Clock()
    schedule = PageSchedule(clock)
    schedule.took(cost)
    times = []
    while clock.now < seconds:
        clock.now += 1
        if schedule.is_due():
            times.append(clock.now)
            clock.now += cost
            schedule.took(cost)
    return times


def test_a_cheap_page_is_written_every_thirty_seconds() -> None:
    assert written_times(cost=0.05, seconds=100) == pytest.approx([30, 61, 92], abs=1)


@pytest.mark.parametrize("cost", [0.5, 3.0, 20.0])
def test_a_dear_page_takes_at_most_a_hundredth_of_the_time(cost: float) -> None:
    seconds = 20_000
    times = written_times(cost=cost, seconds=seconds)
    assert times, "it is written at all"
    for number, now in enumerate(times, start=1):
        # With the page of the start.
        assert (number + 1) * cost <= 0.01 * now + 1e-9
    assert PageSchedule(Clock()).pause() == 30


def test_a_page_that_became_dear_waits_longer() -> None:
    clock = Clock()
    schedule = PageSchedule(clock)
    schedule.took(0.1)
    clock.now = 1000
    assert schedule.is_due()
    schedule.took(9.0)
    clock.now = 1500
    assert not schedule.is_due() and schedule.pause() == 900


def test_a_page_without_room_costs_itself_and_leaves_the_old_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.read(make_run(tmp_path, steps(2)), is_own=True)
    writer = PageWriter(folder)
    writer.write()
    old = (tmp_path / "report.html").read_bytes()

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    with caplog.at_level(logging.WARNING):
        writer.write()
        writer.write()
    assert caplog.text.count("is not written, the run goes on without") == 1
    assert (tmp_path / "report.html").read_bytes() == old
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "report.html"]


def test_whatever_a_metric_does_to_the_page_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder.read(make_run(tmp_path, steps(2)), is_own=True)
    folder.events.append({"no": "event"})
    PageWriter(folder).write()
    assert "is not written" in caplog.text


def test_who_reads_a_page_while_it_is_written_sees_a_whole_one(tmp_path: Path) -> None:
    folder = RunFolder.read(make_run(tmp_path, steps(2)), is_own=True)
    PageWriter(folder).write()
    page = tmp_path / "report.html"
    with page.open() as reader:
        folder.metrics.add(3, {"critic/score/mean": 9.0})
        PageWriter(folder).write()
        assert content_in(reader.read())["runs"][0]["lastStep"] == 2
    assert content_in(page.read_text())["runs"][0]["lastStep"] == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_an_error_of_the_command(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OSError):
        write_html({"title": ""}, tmp_path / "report.html")
