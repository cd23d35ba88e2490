"""Tests each tracker with its real package, which writes to this machine alone and is read back.

wandb and clearml fit beside the project's packages. The others do not, so that they get a Python of
their own, as trackers.python names one.
"""

import json
import logging
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from features.trackers import Tracking

# Runs one of these in the trackers' own Python, and prints what it finds as JSON.
READ_MLFLOW = """
import json, mlflow
client = mlflow.MlflowClient()
found = []
for experiment in client.search_experiments():
    for run in client.search_runs([experiment.experiment_id]):
        history = client.get_metric_history(run.info.run_id, "val-core/x/mean_at_4")
        table = mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/val_generations/3.json")
        steps = [[point.step, point.value] for point in history]
        found.append([run.info.run_id, run.info.status, steps, run.data.params["a.lr"], table])
print(json.dumps(found))
"""
READ_TRACKIO = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
found = []
for run in trackio.Api().runs("project"):
    found.append([run.name, run.config, SQLiteStorage.get_logs("project", run.name)])
print(json.dumps(found, default=str))
"""
READ_SWANLAB = """
import glob, json, sys
from swanlab.proto.swanlab.record.v1.record_pb2 import Record
from swanlab.sdk.internal.core_python.store import DataStoreReader
found = []
for file in sorted(glob.glob(f"{sys.argv[1]}/swanlog/run-*/*.swanlab")):
    reader = DataStoreReader()
    reader.open(file)
    while (line := reader.scan()) is not None:
        record = Record()
        record.ParseFromString(line)
        if record.HasField("start"):
            found.append(["start", record.start.id])
        if record.HasField("scalar") and record.scalar.key == "val-core/x/mean@4":
            found.append(["scalar", record.scalar.step, record.scalar.value.number])
        if record.HasField("media"):
            found.append([record.media.key, record.media.step])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with mlflow, swanlab and trackio, which want older packages than the project."""
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("there is no uv to install trackers with")
    folder = tmp_path_factory.mktemp("trackers") / "venv"
    python = str(folder / "bin/python")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
    requirements = Path(__file__).with_name("requirements-trackers.txt")
    install = [uv, "pip", "install", "--quiet", "--python", python, "-r", requirements]
    installed = subprocess.run(install, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"the trackers' packages can not be had: {installed.stderr[-300:]}")
    return python


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line.message for line in caplog.records if line.levelno >= logging.WARNING]


def run_twice(name: str, folder: Path, python: str | None = None) -> list[str]:
    """Logs steps 1 to 3, resumes from step 2 and logs 3 and 4; returns the ids of both runs."""
    ids = []
    for resume_step in (0, 2):
        config = {"a": {"lr": 0.5, "names": [1, "x"], "none": None}}
        with Tracking(
            "project", "name", [name], config, folder, resume_step, timeout_s=90, python=python
        ) as trackers:
            for step in range(resume_step + 1, resume_step + 4):
                rows = [{"uid": "u", "input": f"<b>{step}", "output": "ä\n", "score": 0.5}]
                trackers.log_generations(rows, step)
                trackers.log({"val-core/x/mean@4": step / 2, "not/finite": float("nan")}, step)
        ids.append(json.loads((folder / "trackers.json").read_text())[name]["run_id"])
    return ids


def read(code: str, python: str, *arguments: str) -> Any:
    output = subprocess.run(
        [python, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    return json.loads(output.stdout.splitlines()[-1])


def records_of_log(data: bytes) -> Iterator[bytes]:
    """Yields the records of a log in blocks of 32 KiB, each part with a header of seven bytes."""
    position = 7
    record = b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        # Whole, or the last part.
        if kind in (1, 4):
            yield record
            record = b""


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_MODE", "offline")
    first_id, second_id = run_twice("wandb", tmp_path)
    assert first_id == second_id and not warnings_of(caplog)
    steps, tables = [], []
    for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for data in records_of_log(file.read_bytes()):
            record = internal.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") != "history":
                continue
            items = {}
            for item in record.history.item:
                items[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
            steps.append((record.history.step.num, items["val-core/x/mean@4"]))
            tables.append(items["val/generations._type"])
    assert steps == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0), (5, 2.5)]
    files = {path.name: path for path in tmp_path.rglob("*.table.json")}
    assert len(files) == 5 and tables == ["table-file"] * 5
    contents = [json.loads(path.read_text())["data"] for path in files.values()]
    assert [[3, "<b>3", "ä\n", 0.5]] in contents


@pytest.mark.slow
def test_clearml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Its close takes ten seconds by itself, twice."""
    pytest.importorskip("clearml")
    monkeypatch.setenv("CLEARML_OFFLINE_MODE", "1")
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path / "cache"))
    ids = run_twice("clearml", tmp_path)
    # An offline session can not be continued; no step is in both.
    assert ids[0] != ids[1]
    assert warnings_of(caplog) == [f"tracker clearml has no run {ids[0]} any more: a new one"]
    steps, tables = [], []
    for run_id in ids:
        (session,) = tmp_path.rglob(f"{run_id}.zip")
        with zipfile.ZipFile(session) as parts:
            for line in parts.read("metrics.jsonl").decode().splitlines():
                for event in json.loads(line):
                    if event["metric"] == "val-core":
                        steps.append((event["iter"], event["variant"], event["value"]))
                    if event["metric"] == "val":
                        tables.append((event["iter"], "<b>" in json.dumps(event)))
    assert steps == [(step, "x/mean@4", step / 2) for step in (1, 2, 3, 4, 5)]
    assert tables == [(step, True) for step in (1, 2, 3, 4, 5)]


@pytest.mark.slow
def test_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, other_python: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    # What needs no database; the calls are the same.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    first_id, second_id = run_twice("mlflow", tmp_path, other_python)
    assert first_id == second_id and not warnings_of(caplog)
    ((run_id, status, steps, lr, table),) = read(READ_MLFLOW, other_python)
    assert (run_id, status, lr) == (first_id, "FINISHED", "0.5")
    assert steps == [[step, step / 2] for step in (1, 2, 3, 4, 5)]
    assert table["columns"] == ["step", "input", "output", "score"]
    assert table["data"] == [[3, "<b>3", "ä\n", 0.5]]
    # A store that has lost the run gets another.
    shutil.rmtree(tmp_path / "mlruns")
    third_id = run_twice("mlflow", tmp_path, other_python)[-1]
    assert third_id not in (first_id, None)


@pytest.mark.slow
def test_trackio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, other_python: str
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    first_id, second_id = run_twice("trackio", tmp_path, other_python)
    assert first_id == second_id and not warnings_of(caplog)
    ((name, config, logs),) = read(READ_TRACKIO, other_python)
    assert name == first_id and config["a"]["lr"] == 0.5
    name = "val-core/x/mean@4"
    steps = [(entry["step"], entry[name]) for entry in logs if name in entry]
    assert steps == [(step, step / 2) for step in (1, 2, 3, 4, 5)]
    tables = [entry["val/generations"] for entry in logs if "val/generations" in entry]
    assert tables[2]["_value"] == [{"step": 3, "input": "<b>3", "output": "ä\n", "score": 0.5}]


@pytest.mark.slow
def test_swanlab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, other_python: str
) -> None:
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    first_id, second_id = run_twice("swanlab", tmp_path, other_python)
    assert first_id == second_id and not warnings_of(caplog)
    found = read(READ_SWANLAB, other_python, str(tmp_path))
    assert [entry for entry in found if entry[0] == "start"] == [["start", first_id]] * 2
    scalars = [entry[1:] for entry in found if entry[0] == "scalar"]
    assert scalars == [[step, step / 2] for step in (1, 2, 3, 4, 5)]
    tables = [entry[1] for entry in found if entry[0] == "val/generations"]
    assert tables == [1, 2, 3, 4, 5]


def test_a_python_that_lacks_the_package_costs_the_tracker_alone(
    tmp_path: Path, caplog: Any
) -> None:
    empty = tmp_path / "empty"
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("there is no uv to make a Python with")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, empty], check=True)
    with Tracking(
        "p", "e", ["mlflow", "file"], {}, tmp_path, timeout_s=30, python=str(empty / "bin/python")
    ) as trackers:
        trackers.log({"a": 1.0}, 1)
    assert "No module named 'mlflow'" in caplog.text
    assert os.path.getsize(tmp_path / "metrics.jsonl") > 0
