"""Tests that a tracker's package may fail, hang or die at any moment, and costs its lines alone.

The packages here are modules that do just that; runs/test_trackers.py beside this file has the real
ones.
"""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from features.trackers import Tracking, process
from features.trackers.child import RUNS
from features.trackers.exchange import PACKAGES
from tests.conftest import PROJECT

# A package that writes what it is told to a file, and does what `{moment}` says there.
STUB = """
import json, os, pathlib, subprocess, sys, time
HERE = pathlib.Path(__file__).parent
def at(moment):
    if (HERE / moment).exists():
        exec((HERE / moment).read_text())
def keep(*entry):
    with (HERE / "records").open("a") as file:
        print(json.dumps(entry), file=file)
at("import")
class Settings:
    def __init__(self, **settings): pass
class Table:
    def __init__(self, columns, data): self.data = data
class Run:
    url = None
    def __init__(self, id): self.id = id
    def log(self, data, step, commit):
        print("noise on standard output")
        at("log")
        keep(step, sorted(data))
    def finish(self, exit_code):
        at("finish")
        keep("finish", exit_code)
def init(id=None, **rest):
    at("init")
    keep("init", id)
    return Run(id or "first-id")
"""
HANG = "subprocess.Popen(['sleep', '1000']); time.sleep(1000)"
ROWS = [{"uid": "u", "input": "2+2", "output": "4", "score": 1.0}]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package `wandb`, which goes before the real one."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "wandb.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(process, "GRACE_S", 0.5)
    return folder


def tracking(tmp_path: Path, resume_step: int = 0, timeout_s: float = 20, **more) -> Tracking:
    return Tracking(
        "p", "e", ["file", "wandb"], {}, tmp_path / "run", resume_step, timeout_s=timeout_s, **more
    )


def records(package: Path) -> list:
    file = package / "records"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def steps_of_file(tmp_path: Path) -> list[int]:
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.mark.seconds
@pytest.mark.parametrize("moment", ["import", "init", "log", "finish"])
@pytest.mark.parametrize("fault", ["raise RuntimeError('no')", "sys.exit(3)", "os._exit(4)", HANG])
def test_a_tracker_that_fails_costs_its_own_lines_and_leaves_no_process(
    package: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    moment: str,
    fault: str,
) -> None:
    (package / moment).write_text(fault)
    before = set(children())
    start = time.monotonic()
    with tracking(tmp_path, timeout_s=2.0) as trackers:
        trackers.log({"a": 1.0}, step=1)
        trackers.log({"a": 2.0}, step=2)
        # The run waits for no tracker before its end.
        assert time.monotonic() - start < 1.5
    assert time.monotonic() - start < 8
    assert steps_of_file(tmp_path) == [1, 2]
    assert caplog.text.count("tracker wandb failed") == 1
    assert set(children()) <= before
    if fault == HANG:
        assert "2 s" in caplog.text


@pytest.mark.parametrize(
    ("fault", "told"), [("os._exit(7)", "exit code 7"), ("os.kill(os.getpid(), 9)", "signal 9")]
)
def test_how_a_trackers_process_ended_is_told(
    package: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str, told: str
) -> None:
    (package / "log").write_text(fault)
    with tracking(tmp_path) as trackers:
        trackers.log({"x": 1.0}, 1)
    assert f"its process ended: {told}; its own words are in" in caplog.text


def test_one_failed_step_does_not_cost_the_next(package: Path, tmp_path: Path) -> None:
    (package / "log").write_text("os.remove(HERE / 'log'); raise OSError('no network')")
    with tracking(tmp_path) as trackers:
        for step in (1, 2, 3):
            trackers.log({"a": 1.0}, step)
    assert [entry[0] for entry in records(package)] == ["init", 2, 3, "finish"]


def test_a_process_that_died_is_begun_again_with_the_same_run(
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(process, "RETRY_S", 0.0)
    (package / "log").write_text("os.remove(HERE / 'log'); os._exit(1)")
    with tracking(tmp_path) as trackers:
        for step in (1, 2, 3):
            trackers.log({"a": 1.0}, step)
    assert records(package)[:2] == [["init", None], ["init", "first-id"]]
    assert [entry[0] for entry in records(package)[2:]] == [2, 3, "finish"]
    assert "lacks 1 steps" in caplog.text


def test_a_resumed_run_continues_the_trackers_run_and_sends_no_step_twice(
    package: Path, tmp_path: Path
) -> None:
    with tracking(tmp_path) as trackers:
        for step in (1, 2, 3):
            trackers.log_generations(ROWS, step)
            trackers.log({"a": step}, step)
    # The run had got to step 3, its checkpoint is of step 2.
    with tracking(tmp_path, resume_step=2) as trackers:
        for step in (3, 4):
            trackers.log_generations(ROWS, step)
            trackers.log({"a": step}, step)
    names = ["val/generations"], ["a"]
    assert records(package) == [
        ["init", None],
        *([step, name] for step in (1, 2, 3) for name in names),
        ["finish", 0],
        ["init", "first-id"],
        *([4, name] for name in names),
        ["finish", 0],
    ]
    assert steps_of_file(tmp_path) == [1, 2, 3, 4]
    lines = (tmp_path / "run/val_generations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert json.loads(lines[0]) == {"step": 1, **ROWS[0]}


def test_a_new_run_and_one_that_goes_back_get_a_run_of_their_own(
    package: Path, tmp_path: Path
) -> None:
    for resume_step, more in ((0, {}), (0, {}), (1, {"goes_back": True})):
        with tracking(tmp_path, resume_step, **more) as trackers:
            for step in (resume_step + 1, resume_step + 2):
                trackers.log({"a": 1.0}, step)
    # The last one goes back behind step 2, which the tracker has.
    opened = [entry for entry in records(package) if entry[0] == "init"]
    assert opened == [["init", None]] * 3
    with tracking(tmp_path, resume_step=3, goes_back=True) as trackers:
        trackers.log({"a": 1.0}, 4)
    assert ["init", "first-id"] in records(package)


@pytest.mark.parametrize("damage", ["", "[1]", '{"wandb": {"run_id": 3}}', '{"wandb": null}'])
def test_a_damaged_file_of_ids_begins_the_trackers_run_anew(
    package: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/trackers.json").write_text(damage)
    with tracking(tmp_path, resume_step=1) as trackers:
        trackers.log({"a": 1.0}, 2)
    assert records(package)[0] == ["init", None] and "is damaged" in caplog.text


def test_a_run_that_fails_is_told_to_the_tracker(package: Path, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), tracking(tmp_path) as trackers:
        trackers.log({"a": float("nan")}, 1)
        raise ZeroDivisionError
    assert records(package)[-1] == ["finish", 1]


@pytest.mark.seconds
def test_a_run_that_is_killed_leaves_no_tracker(package: Path, tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from features.trackers import Tracking\n"
        f"tracking = Tracking('p', 'e', 'wandb', {{}}, {str(tmp_path / 'run')!r}, timeout_s=5)\n"
        "tracking.log({'a': 1.0}, 1)\n"
        f"while not os.path.exists({str(package / 'records')!r}): time.sleep(0.05)\n"
        "time.sleep(0.3); os.kill(os.getpid(), 9)"
    )
    environment = os.environ | {"PYTHONPATH": f"{PROJECT}{os.pathsep}{package}"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    deadline = time.monotonic() + 10
    while records(package)[-1] != ["finish", 1] and time.monotonic() < deadline:
        time.sleep(0.1)
    # Its process closed the run by itself.
    assert records(package)[-1] == ["finish", 1]


def test_what_a_tracker_prints_is_in_its_log_and_nowhere_else(
    package: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with tracking(tmp_path) as trackers:
        trackers.log({"a": 1.0}, 1)
    assert "noise" not in "".join(capfd.readouterr())
    assert "noise on standard output" in (tmp_path / "run/trackers/wandb.log").read_text()


def test_a_full_disk_costs_no_tracker_its_lines(package: Path, tmp_path: Path) -> None:
    # No file can be made where the run's folder should be.
    (tmp_path / "run").mkdir()
    (tmp_path / "run/trackers.json.tmp").mkdir()
    with tracking(tmp_path) as trackers:
        trackers.log({"a": 1.0}, 1)
    assert [entry[0] for entry in records(package)] == ["init", 1, "finish"]


def test_a_trackers_process_needs_no_package_of_the_run() -> None:
    # As in another Python (trackers.python), which has the tracker's package alone.
    code = "import features.trackers.child, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-S", "-c", code], cwd=PROJECT, check=True)


def test_the_lists_of_trackers_agree() -> None:
    assert tuple(RUNS) == PACKAGES


def test_json_is_an_object_a_step_and_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger().warning("beside")
    with Tracking("p", "e", ["json"], {}, tmp_path) as trackers:
        trackers.log_generations(ROWS, 1)
        trackers.log({"a": 1, "b": float("nan"), "ümlaut\n": 2}, 1)
        trackers.log({"a": float("inf")}, 2)
    lines = capfd.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "a": 1.0, "b": "nan", "ümlaut\n": 2.0},
        {"step": 2, "a": "inf"},
    ]


def test_tensorboard_gets_generations_as_text(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Tracking("p", "e", ["tensorboard"], {}, tmp_path) as trackers:
        trackers.log_generations([{"input": "<b>", "output": "4", "score": 1.0}], 3)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (event,) = events.Tensors("val/generations/0/text_summary")
    assert event.step == 3 and b"    <b>\n    --> 4" in event.tensor_proto.string_val[0]
