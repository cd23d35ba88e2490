"""The record of a run never ends it: odd folders, odd metrics, odd errors."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from data.protocol import DataProto
from data.watchdog import ATTEMPT
from features.run_page.events import read_events
from features.run_page.observer import describe_validation, open_page
from training.config import PPOConfig
from training.observers import Notice, ObservedRun, Observers, StepReport


@contextmanager
def make_record(folder: Path, step: int = 0) -> Iterator[Observers]:
    run = ObservedRun(config=PPOConfig(), run_dir=folder, total_steps=10)
    page = open_page(run)
    assert page is not None
    observers = Observers(run, {"run_page": page})
    with observers.watching(step):
        yield observers


def add(
    record: Observers, step: int, metrics: dict[str, float], notices: Sequence[Notice] = ()
) -> None:
    record.run.step = step
    record.step_made(StepReport(step=step, batch=DataProto(), notices=list(notices)))
    record.validated(step, metrics, [])
    record.step_logged(metrics)


def events(folder: Path) -> list[tuple[str, int]]:
    return [(event["kind"], event["step"]) for event in read_events(folder / "events.jsonl")]


def test_a_step_adds_its_alarms_its_validation_and_its_checkpoint(tmp_path: Path) -> None:
    with make_record(tmp_path) as record:
        rang = Notice("kl_jump", "it rang", "list?step=1")
        add(record, 1, {"critic/score/mean": 1.0}, [rang])
        add(record, 2, {"val-core/game/reward/mean@1": 0.25})
        record.checkpoint_saved(1)
    assert events(tmp_path) == [
        ("start", 0),
        ("alarm", 1),
        ("validation", 2),
        ("checkpoint", 1),
        ("end", 2),
    ]


def test_what_an_observer_behind_the_page_notices_is_shown_too(tmp_path: Path) -> None:
    with make_record(tmp_path) as record:
        record.run.step = 1
        report = StepReport(step=1, batch=DataProto())
        record.step_made(report)
        report.notices.append(Notice("mine", "look here"))
        record.step_logged({"critic/score/mean": 1.0})
    assert ("alarm", 1) in events(tmp_path)


def test_the_error_of_the_run_stays_the_one_that_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), make_record(tmp_path) as record:
        add(record, 1, {})
        raise ValueError("mine")
    [*_, end] = read_events(tmp_path / "events.jsonl")
    assert (end["exit"], end["name"], end["text"]) == ("failed", "ValueError", "ValueError: mine")


def test_whatever_lies_in_the_folder_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("events.jsonl", "metrics.jsonl", "report.html"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    with caplog.at_level(logging.WARNING), make_record(tmp_path, step=3) as record:
        add(record, 4, {"critic/score/mean": 1.0})
        add(record, 5, {"critic/score/mean": "no number"})  # type: ignore[dict-item]
    assert "goes on" in caplog.text


def test_another_attempt_at_step_0_keeps_what_the_first_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ATTEMPT not in os.environ
    with make_record(tmp_path):
        pass
    (tmp_path / "events.jsonl").write_text(
        '{"time": 1, "step": 0, "kind": "start"}\n{"time": 2, "step": 0, "kind": "restart"}\n'
    )
    monkeypatch.setenv(ATTEMPT, "2")
    with make_record(tmp_path):
        pass
    assert [kind for kind, _ in events(tmp_path)] == ["start", "restart", "start", "end"]


def test_many_validation_rewards_are_said_shortly() -> None:
    metrics = {f"val-core/s{n}/reward/mean@4": n / 8 for n in range(6)}
    metrics["val-core/s0/reward/best@4/mean"] = 1.0
    said = describe_validation(metrics)
    assert said.startswith("s0/reward/mean@4 0, s1/reward/mean@4 0.125") and "2 more" in said
    assert "best@" not in said and describe_validation({"critic/score/mean": 1.0}) == ""


def test_a_run_that_goes_on_tells_of_the_kill_before_it(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(
        '{"time": 1, "step": 0, "kind": "start"}\n{"time": 2, "step": 4, "kind": "alarm"}\n'
    )
    with make_record(tmp_path, step=4):
        pass
    found = list(read_events(tmp_path / "events.jsonl"))
    assert [one["kind"] for one in found] == ["start", "alarm", "end", "resume", "end"]
    assert (found[2]["exit"], found[2]["name"]) == ("failed", "killed")
    # One that ended well is told of once.
    with make_record(tmp_path, step=4):
        pass
    assert [kind for kind, _ in events(tmp_path)][-3:] == ["end", "resume", "end"]
