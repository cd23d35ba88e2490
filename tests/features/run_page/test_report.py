"""Tests the report: reading metrics.jsonl, the table and the picture."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from features.run_page.report import main, read_metrics, write_report

ROOT = Path(__file__).parents[3]


def write_run(folder, records):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def steps(count):
    return [
        {
            "step": n,
            "critic/score/mean": n / 10,
            "response_length/mean": 30.0,
            "timing_s/step": 10.0,
        }
        for n in range(1, count + 1)
    ]


def test_the_later_value_of_a_step_counts_and_partly_written_lines_are_skipped(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        '{"step": 2, "a": 5}\n{"step": 1, "a": "nan", "b": 1}\n'
        '{"step": 2, "a": 7, "b": 2}\n{"step": 3, "a"'
    )
    metrics = read_metrics(file)
    assert metrics.index.tolist() == [1, 2] and metrics["b"].tolist() == [1, 2]
    assert np.array_equal(metrics["a"], [np.nan, 7], equal_nan=True)


def test_the_table_has_means_of_the_first_steps_and_of_the_last(tmp_path):
    records = [{"step": 0, "val-core/sum/reward/mean@1": 0.1}, *steps(9)]
    records[3]["critic/score/mean"] = 2.0
    lines = {
        line.split("  ")[0]: line.split()
        for line in write_report(write_run(tmp_path, records)).splitlines()
    }
    # (0.1 + 0.2 + 2 + 0.4) / 4 and the mean of 0.6 … 0.9: no step counts in both.
    assert lines["reward"][1:] == ["0.675", "0.75"]
    assert lines["time per step, s"][4:] == ["10", "10"]
    assert "KL to the reference, nats" not in lines


def test_picture_is_written(tmp_path):
    write_report(write_run(tmp_path, steps(12)))
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG") and (
        tmp_path / "report.png"
    ).stat().st_size > 20_000


def test_names_are_no_formulas_and_numbers_may_be_larger_than_any(tmp_path):
    folder = tmp_path / os.fsdecode(b"$a_{$ \xfc")
    folder.mkdir()
    steps = [{"step": 1, "critic/score/mean": 10**400, "val-core/$b_{$/reward/mean@1": 0.5}]
    steps += [{"step": 2, "critic/score/mean": 1.0}, {"step": 3, "critic/score/mean": 2.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert "reward" in write_report(folder)
    assert (folder / "report.png").stat().st_size > 1000


def test_a_folder_that_takes_no_picture_has_its_table_and_its_page_elsewhere(tmp_path, capsys):
    run = tmp_path / "run"
    (run / "report.png").mkdir(parents=True)
    steps = [{"step": step, "critic/score/mean": step} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    main([str(run), "--out", str(tmp_path / "page.html")])
    printed = capsys.readouterr()
    assert "reward" in printed.out and f"page: {tmp_path / 'page.html'}" in printed.out
    assert "no picture: " in printed.err
    assert {path.name for path in run.iterdir()} == {"metrics.jsonl", "report.png"}


def test_a_run_of_one_step_with_nothing_but_a_reward_works(tmp_path):
    table = write_report(write_run(tmp_path, [{"step": 1, "critic/score/mean": 0.5}]))
    assert [line.split() for line in table.splitlines()] == [["step", "1"], ["reward", "0.5"]] and (
        tmp_path / "report.png"
    ).exists()


@pytest.mark.parametrize(
    ("count", "columns", "reward"),
    [
        (2, "first step last step", ["0.1", "0.2"]),
        (5, "first 2 steps last 2 steps", ["0.15", "0.45"]),
        (12, "first 5 steps last 5 steps", ["0.3", "1"]),
    ],
)
def test_the_columns_of_a_short_run_are_not_the_same_steps(tmp_path, count, columns, reward):
    header, row, *_ = write_report(write_run(tmp_path, steps(count))).splitlines()
    assert header.split() == columns.split() and row.split()[1:] == reward


def test_missing_file_and_missing_metric_say_what_there_is(tmp_path):
    with pytest.raises(ValueError, match=r"trainer.logger has 'file'"):
        write_report(tmp_path)
    with pytest.raises(ValueError, match="holds no steps"):
        write_report(write_run(tmp_path, []))
    with pytest.raises(ValueError, match="no 'critic/score/mean'; it has: loss"):
        write_report(write_run(tmp_path, [{"step": 1, "loss": 0.5}]))


@pytest.mark.seconds
def test_command_line_prints_the_table_and_the_pictures_place(tmp_path):
    command = [sys.executable, "-m", "features.run_page.report", str(write_run(tmp_path, steps(3)))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "reward" in done.stdout and str(tmp_path / "report.png") in done.stdout
    assert f"page: {tmp_path}/report.html" in done.stdout and (tmp_path / "report.html").exists()
    failed = subprocess.run(
        [*command[:-1], str(tmp_path / "none")], cwd=ROOT, capture_output=True, text=True
    )
    assert failed.returncode == 2
    assert failed.stderr.startswith(f"python -m features.run_page.report: {tmp_path}/none holds no")


def test_a_missing_run_ends_with_a_sentence_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "nope")])
    assert ended.value.code == 2
    assert "nope" in capsys.readouterr().err
