"""A run makes its viewer: links are never dead, and what goes wrong ends no run."""

from __future__ import annotations

import os
import resource
import selectors
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from features.viewer import live
from features.viewer.command import main
from features.viewer.follower import Follower
from features.viewer.live import LiveViewer, open_live_viewer
from tests.made_episodes import Made, make_run
from tests.viewer_data import listed, manifest
from training.config.loader import load_config


def observer(folder: Path) -> Any:
    return LiveViewer(SimpleNamespace(run_dir=folder))  # type: ignore[arg-type]


def wait_for_answer(follower: Follower, timeout_s: float = 300.0) -> None:
    """Waits until the process has answered, and leaves the answer to be read."""
    with selectors.DefaultSelector() as selector:
        selector.register(follower._stdout, selectors.EVENT_READ)
        assert selector.select(timeout_s)


def test_a_run_that_begins_has_a_viewer_that_says_so(tmp_path: Path) -> None:
    observer(tmp_path).run_started(0, ())
    assert (tmp_path / "viewer/index.html").is_file()
    told = manifest(tmp_path / "viewer")
    assert told["goes_on"] and told["episodes"] == 0 and told["faults"] == []


@pytest.mark.seconds
def test_a_run_that_ends_has_all_its_episodes(tmp_path: Path) -> None:
    watching = observer(tmp_path)
    watching.run_started(0, ())
    make_run(tmp_path, Made(steps=2))
    for error in (None, RuntimeError("broken")):
        watching.run_ended(error)
        assert len(listed(tmp_path / "viewer")) == 32
        assert not manifest(tmp_path / "viewer")["goes_on"]


def test_a_resumed_run_keeps_the_viewer_that_it_has(tmp_path: Path) -> None:
    make_run(tmp_path, Made(steps=1))
    assert main([str(tmp_path)]) == 0
    watching = observer(tmp_path)
    watching.run_started(1, ())
    assert len(listed(tmp_path / "viewer")) == 16
    watching.run_started(0, ())
    assert manifest(tmp_path / "viewer")["episodes"] == 0


@pytest.mark.seconds
def test_it_is_made_again_in_a_process_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(live, "LEAST_PAUSE_S", 0.0)
    make_run(tmp_path, Made(steps=1))
    watching = observer(tmp_path)
    watching.run_started(0, ())
    watching.step_logged({})
    follower = watching._follower
    assert os.getpriority(os.PRIO_PROCESS, follower.process.pid) == 19
    wait_for_answer(follower)
    assert len(listed(tmp_path / "viewer")) == 16 and manifest(tmp_path / "viewer")["goes_on"]
    watching.step_logged({})
    assert not follower.is_asked, "there is no time for another one yet"
    make_run(tmp_path, Made(steps=2))
    watching.run_ended(None)
    assert watching._follower is None and follower.process.returncode is not None
    assert len(listed(tmp_path / "viewer")) == 32 and not manifest(tmp_path / "viewer")["goes_on"]


@pytest.mark.seconds
def test_the_process_ends_with_its_run(tmp_path: Path) -> None:
    """A run that is killed closes its end of the pipe."""
    follower = Follower(tmp_path)
    follower._stdin.close()
    assert follower.process.wait(timeout=300) == 0
    follower.stop()


@pytest.mark.seconds
def test_a_process_that_is_stopped_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(live, "LEAST_PAUSE_S", 0.0)
    make_run(tmp_path, Made(steps=3))
    watching = observer(tmp_path)
    watching.step_logged({})
    process = watching._follower.process
    watching.run_ended(KeyboardInterrupt())
    assert process.poll() is not None
    assert not list(tmp_path.glob("viewer.*"))


@pytest.mark.seconds
def test_records_that_are_many_are_shown_by_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "SMALL_BYTES", 10)
    make_run(tmp_path, Made(steps=1))
    observer(tmp_path).run_ended(None)
    assert len(listed(tmp_path / "viewer")) == 16


def test_what_is_no_viewer_is_left_alone_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_run(tmp_path, Made(steps=1))
    (tmp_path / "viewer").mkdir()
    (tmp_path / "viewer/mine.txt").write_text("mine")
    watching = observer(tmp_path)
    watching.run_started(0, ())
    watching.run_ended(None)
    assert (tmp_path / "viewer/mine.txt").read_text() == "mine"
    assert "is no viewer" in caplog.text


def test_files_that_may_not_grow_cost_the_viewer_and_are_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(live, "LEAST_PAUSE_S", 0.0)
    make_run(tmp_path, Made(steps=1))
    watching = observer(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        watching.run_started(0, ())
        watching.run_ended(None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caplog.text.count("the viewer of the run is not made") == 1
    assert "File too large" in caplog.text


@pytest.mark.seconds
def test_a_process_that_cannot_make_the_viewer_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its output goes nowhere, so that on a full disk a long run lost its viewer without a word."""
    monkeypatch.setattr(live, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(live, "LEAST_PAUSE_S", 0.0)
    monkeypatch.setattr(live, "LARGEST_SHARE", 1e9)
    make_run(tmp_path, Made(steps=1))
    (tmp_path / "viewer").write_text("no folder")
    watching = observer(tmp_path)
    for _ in range(2):
        watching.step_logged({})
        wait_for_answer(watching._follower)
    watching.step_logged({})
    watching.closed()
    assert caplog.text.count("the viewer of the run is not made") == 1
    assert "viewer is a file" in caplog.text


@pytest.mark.seconds
def test_a_process_that_is_killed_is_told_and_another_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(live, "LEAST_PAUSE_S", 0.0)
    monkeypatch.setattr(live, "LARGEST_SHARE", 1e9)
    make_run(tmp_path, Made(steps=1))
    watching = observer(tmp_path)
    watching.step_logged({})
    first = watching._follower
    first.process.kill()
    wait_for_answer(first)
    watching.step_logged({})
    assert "features.viewer.command" in caplog.text
    assert watching._follower is not first
    watching.run_ended(None)
    assert len(listed(tmp_path / "viewer")) == 16


@pytest.mark.parametrize(
    ("logger", "val_only", "keep_gib", "is_made"),
    [
        ("file", "false", 1, True),
        ("console", "false", 1, False),
        ("file", "true", 1, False),
        ("file", "false", 0, False),
    ],
)
def test_it_goes_with_page_and_records(
    logger: str, val_only: str, keep_gib: int, is_made: bool
) -> None:
    settings = (f"trainer.logger={logger}", f"trainer.val_only={val_only}")
    words = ["configs/quickstart.yaml", *settings, f"records.keep_gib={keep_gib}"]
    run: Any = SimpleNamespace(config=load_config(words, check=False).config)
    assert (open_live_viewer(run) is not None) == is_made


def test_a_bundle_is_one_folder_whose_links_lead_into_it(tmp_path: Path) -> None:
    pages = pytest.importorskip("tests.features.run_page.made_runs")
    pages.make_run(tmp_path / "run", pages.steps(2), [pages.event("alarm", 1, name="kl_jump")])
    make_run(tmp_path / "run", Made(steps=1))
    bundle = tmp_path / "send"
    for _ in range(2):
        assert main([str(tmp_path / "run"), "--bundle", str(bundle)]) == 0
        assert sorted(path.name for path in bundle.iterdir()) == [
            "events.jsonl",
            "metrics.jsonl",
            "report.html",
            "viewer",
        ]
        (run,) = pages.content_in((bundle / "report.html").read_text())["runs"]
        assert run["viewer"]["href"] == "viewer/index.html" and run["viewer"]["isThere"]
        assert len(listed(bundle / "viewer")) == 16
    assert not (tmp_path / "run/viewer").exists()
    (bundle / "mine.txt").write_text("mine")
    assert main([str(tmp_path / "run"), "--bundle", str(bundle)]) == 2
