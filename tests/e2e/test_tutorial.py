"""docs/tutorial.md from its first command to its last, with fewer and smaller steps."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

import main
from features.export import export
from features.records import select
from features.run_page import report
from features.viewer import command as viewer
from scripts import replay
from tests.conftest import PROJECT
from training.run.signals import EndingSignals

PAGE = (PROJECT / "docs/tutorial.md").read_text()
SMALL = {
    "total_training_steps: 60": "total_training_steps: 2",
    "total_training_steps=65": "total_training_steps=3",
    "global_step_60": "global_step_2",
    "episodes/60.jsonl": "episodes/2.jsonl",
    "test_freq: 20": "test_freq: 1",
    "val_length: 128": "val_length: 4",
    "train_batch_size: 16": "train_batch_size: 8",
    "n: 16": "n: 2",
    "num_epochs = 6": "num_epochs = 1",
    "iterations_per_epoch = 10": "iterations_per_epoch = 1",
    "group_size = 16": "group_size = 2",
    "range(100)": "range(3)",
}


def written(page: str, folder: Path) -> list[str]:
    """Writes the page's files into the folder; returns its commands."""
    for name, source in re.findall(r"```\w+\n# (\S+)\n(.*?)```", page, re.S):
        (folder / name).write_text(source)
    page = page.replace("\\\n", " ")
    lines = [
        line.strip().partition("  #")[0] for line in page.splitlines() if line.startswith("    ")
    ]
    starts = ("python ", "PYTHONPATH=. python ", "OMP_NUM_THREADS=1 python ")
    return [
        line.strip().removeprefix("OMP_NUM_THREADS=1 ") for line in lines if line.startswith(starts)
    ]


@pytest.fixture
def folder(tiny_game: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the quickstart's model in its place."""
    (tmp_path / "outputs/quickstart").mkdir(parents=True)
    (tmp_path / "outputs/quickstart/task").symlink_to(tiny_game)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    return tmp_path


def carry_out(command: str, folder: Path) -> None:
    """Runs a command in this process: the imports are most of its time."""
    words = shlex.split(command)
    sys.argv = words[1:]
    if words[1] == "main.py":
        assert main.run(words[2:], EndingSignals()) == 0, command
    elif words[1] == "scripts/replay.py":
        assert replay.main(words[2:]) == 0, command
    elif words[1:3] == ["-m", "features.run_page.report"]:
        assert "reward" in report.write_report(Path(words[3]))
    elif words[1:3] == ["-m", "features.viewer.command"]:
        assert viewer.main(words[3:]) == 0, command
    elif words[1:3] == ["-m", "features.records.select"]:
        assert select.main(words[3:]) == 0, command
    elif words[1:3] == ["-m", "features.export.export"]:
        assert export.main(words[3:]) == 0, command
    elif (folder / words[1]).is_file():
        runpy.run_path(words[1], run_name="__main__")
    else:
        # The model is there already.
        assert (PROJECT / words[1]).is_file(), command


def test_the_tutorial_runs_from_its_first_command_to_its_last(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGE
    for given, small in SMALL.items():
        assert given in page, given
        page = page.replace(given, small)
    commands = written(page, folder)
    assert len(commands) >= 9
    for command in commands:
        carry_out(command, folder)
        if "by_hand" in command:
            said = capsys.readouterr().out
            assert "".join(f"    {line}\n" for line in said.splitlines()) in page
    monkeypatch.delitem(sys.modules, "nim")
    assert "won" in capsys.readouterr().out
    run = folder / "outputs/nim"
    for told in ("report.png", "config.yaml", "config.1.yaml", "global_step_3", "episodes/2.jsonl"):
        assert (run / told).exists(), told
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] == 3 and "agent/info/legal/mean" in metrics[-1]
    assert (folder / "outputs/nim_python/last/actor").is_dir()


@pytest.mark.slow
def test_the_tutorials_agent_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.e2e.test_docs import run

    run(
        sys.executable,
        "examples/prepare_quickstart.py",
        "--out",
        str(tmp_path / "outputs/quickstart/task"),
    )
    written(PAGE, tmp_path)
    run(sys.executable, str(PROJECT / "main.py"), "nim.yaml", folder=tmp_path)
    metrics = [
        json.loads(line)
        for line in (tmp_path / "outputs/nim/metrics.jsonl").read_text().splitlines()
    ]
    rewards = [step["critic/score/mean"] for step in metrics if "critic/score/mean" in step]
    assert rewards[0] < 0.2 and rewards[-1] > 0.9
