"""Tests tracking: what backends write, resuming, partly written files, and trackers that fail."""

import json
import resource

import numpy as np
import pytest
import torch

from features.trackers.base import Tracking
from training.run.metrics_file import cut_back, read_records


def open_tracking(folder, backends="file", resume_step=0):
    return Tracking("project", "experiment", backends, {"lr": 1e-3}, folder, resume_step)


def read_lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_file_gets_one_json_object_per_step(tmp_path):
    with open_tracking(tmp_path / "run") as tracking:
        tracking.log({"a": 1, "b": np.float32(0.5), "c": torch.tensor(2.0)}, step=1)
        # It is there before the file is closed.
        assert read_lines(tmp_path / "run") == [{"step": 1, "a": 1.0, "b": 0.5, "c": 2.0}]
        tracking.log({"a": 2}, step=2)
    assert read_lines(tmp_path / "run")[1] == {"step": 2, "a": 2.0}


def test_non_finite_values_stay_valid_json(tmp_path):
    with open_tracking(tmp_path) as tracking:
        tracking.log({"a": float("nan"), "b": float("inf"), "c": float("-inf")}, step=1)

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert record == {"step": 1, "a": "nan", "b": "inf", "c": "-inf"}
    assert float(record["c"]) == float("-inf")


def test_resuming_cuts_later_steps_and_partly_written_lines(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        '{"step": 0, "v": 1}\n{"step": 1}\n\x00\x00{"st\n{"step": 2}\n[3]\n'
        '{"step": 3}\n{"step": 2, "x": 0.'
    )
    with open_tracking(tmp_path, resume_step=2) as tracking:
        tracking.log({"a": 1}, step=3)
    assert read_lines(tmp_path) == [
        {"step": 0, "v": 1},
        {"step": 1},
        {"step": 2},
        {"step": 3, "a": 1.0},
    ]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_whole_last_line_without_newline_is_kept(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}')
    cut_back(file, resume_step=2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_new_run_starts_the_file_anew(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    with open_tracking(tmp_path) as tracking:
        tracking.log({"a": 1}, step=0)
    assert read_lines(tmp_path) == [{"step": 0, "a": 1.0}]
    assert (tmp_path / "metrics.jsonl.old").read_text() == '{"step": 0}\n{"step": 1}\n'


def test_a_new_run_keeps_the_last_runs_file_in_the_place_of_an_older_one(tmp_path):
    old = tmp_path / "metrics.jsonl.old"
    for run in (1.0, 2.0, 3.0):
        with open_tracking(tmp_path) as tracking:
            tracking.log({"run": run}, step=1)
        assert read_lines(tmp_path) == [{"step": 1, "run": run}]
        assert old.exists() == (run > 1) and (
            run == 1 or json.loads(old.read_text())["run"] == run - 1
        )


def test_a_run_that_never_logged_does_not_replace_the_kept_file(tmp_path):
    (tmp_path / "metrics.jsonl.old").write_text('{"step": 1}\n')
    for _ in range(2):
        open_tracking(tmp_path).close()
    assert (tmp_path / "metrics.jsonl.old").read_text() == '{"step": 1}\n'


def test_resuming_sets_nothing_aside(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    open_tracking(tmp_path, resume_step=1).close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_cutting_back_to_the_same_step_twice_changes_nothing(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(f'{{"step": {n}}}\n' for n in range(10)))
    cut_back(file, resume_step=4)
    once = file.read_bytes()
    cut_back(file, resume_step=4)
    assert file.read_bytes() == once and once.count(b"\n") == 5


def test_tensorboard_hides_what_came_after_the_checkpoint(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_tracking(tmp_path, ["tensorboard"]) as tracking:
        for step in (1, 2, 3):
            tracking.log({"a": step}, step)
    with open_tracking(tmp_path, ["tensorboard"], resume_step=2) as tracking:
        tracking.log({"a": 30}, 3)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("a")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]


def test_a_failing_tracker_warns_once_and_the_others_go_on(tmp_path, capsys, caplog):
    tracking = open_tracking(tmp_path, ["file", "json"])
    tracking.log({"a": 1}, step=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # As on a full disk: the file cannot grow.
    resource.setrlimit(
        resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size, limits[1])
    )
    try:
        tracking.log({"a": 2}, step=2)
        tracking.log({"a": 3}, step=3)
        tracking.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert caplog.text.count("tracker file failed") == 1
    assert read_lines(tmp_path) == [{"step": 1, "a": 1.0}]


def test_a_tracker_that_cannot_open_warns_and_the_run_goes_on(tmp_path, capsys, caplog):
    (tmp_path / "run").write_text("a file where the folder should be")
    with open_tracking(tmp_path / "run", ["file", "json"]) as tracking:
        tracking.log({"a": 1}, step=1)
    assert (
        "tracker file failed" in caplog.text
        and capsys.readouterr().out == '{"step": 1, "a": 1.0}\n'
    )


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"step": null}', 'no "step"'),
        ('{"step": "2"}', 'no "step"'),
        ('{"step": true}', 'no "step"'),
        ('{"step": 2, "a": [1]}', "'a' is no number"),
        ('{"step": 2, "a": null}', "'a' is no number"),
        ('{"step": 2, "a"', "Expecting"),
        ("\0\0\0\0", "Expecting value"),
        ("[" * 100_000, "recursion"),
        ('{"step": 1e99}', 'no "step"'),
    ],
)
def test_a_damaged_line_costs_itself_and_is_named(tmp_path, caplog, line, why):
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 1, "critic/score/mean": "nan"}}\n{line}\n{{"step": 3}}\n')
    assert [record["step"] for record in read_records(file)] == [1, 3]
    assert f"{file}, line 2, is damaged and left out" in caplog.text and why in caplog.text
    with open_tracking(tmp_path, resume_step=3) as tracking:
        tracking.log({"a": 1}, step=4)
    assert [entry["step"] for entry in read_lines(tmp_path)] == [1, 3, 4]


def test_a_line_without_room_leaves_the_next_one_whole(tmp_path, caplog):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_tracking(tmp_path) as tracking:
        tracking.log({"a": 1}, step=1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40, before[1]))
        try:
            tracking.log({"a": 2, "b": 3}, step=2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        tracking.log({"a": 3}, step=3)
    assert [entry["step"] for entry in read_lines(tmp_path)] == [1, 3]
    assert f"{tmp_path}/metrics.jsonl" in caplog.text
