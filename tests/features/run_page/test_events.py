"""Events of a run: whole lines, what a resume cuts and keeps, and disks without room."""

from __future__ import annotations

import json
import logging
import resource
from pathlib import Path
from typing import Any

import pytest

from features.run_page.events import EventLog, describe_error, read_events
from tests.features.run_page.made_runs import event
from training.run.metrics_file import last_recorded_step


def write(folder: Path, *events: dict[str, Any]) -> Path:
    file = folder / "events.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in events))
    return file


def kinds(folder: Path) -> list[str]:
    return [f"{one['kind']} {one['step']}" for one in read_events(folder / "events.jsonl")]


def test_an_event_is_a_whole_line_with_what_every_event_has(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.add("alarm", step=3, name="kl_jump", text="a\nb", view="list?step=3")
    log.add("end", step=4, exit="finished")
    first, second = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(first)["text"] == "a\nb" and json.loads(first)["view"] == "list?step=3"
    assert json.loads(second)["view"] is None and json.loads(second)["exit"] == "finished"
    assert json.loads(second)["time"] >= json.loads(first)["time"] > 1.6e9


def test_a_resume_cuts_what_is_made_again_and_keeps_what_happened_to_processes(
    tmp_path: Path,
) -> None:
    write(
        tmp_path,
        event("start", 0),
        event("validation", 4),
        event("checkpoint", 4),
        event("alarm", 4),
        event("settings", 5, changed={}),
        event("alarm", 6),
        event("checkpoint", 6),
        event("end", 7, exit="failed"),
        event("restart", 7),
    )
    EventLog(tmp_path).begin(4)
    assert kinds(tmp_path) == ["start 0", "validation 4", "checkpoint 4", "alarm 4", "end 7",
                               "restart 7"]  # fmt: skip


def test_a_new_run_sets_the_old_file_aside(tmp_path: Path) -> None:
    write(tmp_path, event("start", 0), event("alarm", 3))
    EventLog(tmp_path).begin(0)
    assert not (tmp_path / "events.jsonl").exists()
    assert (tmp_path / "events.jsonl.old").read_text().count("\n") == 2
    # An empty file does not take its place.
    (tmp_path / "events.jsonl").touch()
    EventLog(tmp_path).begin(0)
    assert (tmp_path / "events.jsonl.old").read_text().count("\n") == 2


def test_a_restart_from_the_beginning_keeps_the_attempts_before(tmp_path: Path) -> None:
    write(
        tmp_path,
        event("start", 0, name="of another run"),
        event("end", 9, exit="finished"),
        event("start", 0),
        event("alarm", 2),
        event("restart", 2),
    )
    kept = EventLog(tmp_path).begin(0, is_restart=True)
    assert [one["kind"] for one in kept] == ["start", "restart"]
    assert kinds(tmp_path) == ["start 0", "restart 2"]


def test_a_line_that_a_kill_broke_off_is_ended_before_the_next(tmp_path: Path) -> None:
    file = write(tmp_path, event("start", 0))
    file.write_text(file.read_text() + '{"time": 1, "st')
    EventLog(tmp_path).add("restart", step=3)
    assert kinds(tmp_path) == ["start 0", "restart 3"]
    EventLog(tmp_path).begin(3)
    assert file.read_text().count("\n") == 2 and "\n{" in file.read_text()


def test_a_full_disk_costs_the_line_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = EventLog(tmp_path)
    log.add("start", step=0)
    size = (tmp_path / "events.jsonl").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
    try:
        with caplog.at_level(logging.WARNING):
            log.add("alarm", step=1)
            log.add("alarm", step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caplog.text.count("the run goes on without") == 1
    assert (tmp_path / "events.jsonl").stat().st_size == size
    log.add("end", step=3)
    assert kinds(tmp_path) == ["start 0", "end 3"]


def test_a_folder_that_is_gone_costs_the_events_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = EventLog(tmp_path / "gone")
    assert log.begin(3) == []
    log.add("start", step=0)
    assert "the run goes on without" in caplog.text


def test_the_last_recorded_step_is_read_from_the_end(tmp_path: Path) -> None:
    assert last_recorded_step(tmp_path) == 0
    lines = [json.dumps({"step": n, "metric": "x" * 100}) for n in range(20_000)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 99')
    assert last_recorded_step(tmp_path) == 19_999


def test_an_error_is_one_line_and_a_ranks_its_last() -> None:
    assert describe_error(ValueError("a\n b")) == "ValueError: a b"
    of_rank = RuntimeError("rank 1\nTraceback (most recent call last):\n  File\nOSError: disk")
    assert describe_error(of_rank) == "RuntimeError: OSError: disk"
    assert len(describe_error(ValueError("x" * 10_000))) == 600
    assert describe_error(KeyboardInterrupt()) == "KeyboardInterrupt:"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_that_cannot_say_what_it_is_is_described_by_its_name() -> None:
    assert describe_error(Mute()) == "Mute: (its __str__ raised RuntimeError)"
