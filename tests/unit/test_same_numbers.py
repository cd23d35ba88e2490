"""The proof that two checkouts train alike: what counts as equal, and what is named first."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from scripts import same_numbers
from scripts.same_compare import (
    RunDifferences,
    compare_runs,
    is_of_the_machine,
    read_checkpoint,
    same_bits,
    tensor_differences,
)
from scripts.same_runs import RUNS, ComparedRun
from tests.needed_features import needs_features
from training.config.loader import load_config
from training.run.metrics_file import METRICS_FILE

METRICS = {"actor/pg_loss": 0.5, "critic/score/mean": 1.0, "timing_s/step": 3.0}
ROW = {"uid": "1.0", "input": "guess", "output": "4", "score": 1.0}


def write_run(folder: Path, *, changes: dict[int, dict[str, Any]], output: str = "4") -> Path:
    """Writes a run of two steps: metrics, texts and a checkpoint.

    Args:
        changes: metrics that replace METRICS, by step; None takes one out.
        output: the episode's text in step 2.
    """
    lines = []
    for step in (1, 2):
        metrics = METRICS | changes.get(step, {})
        kept = {name: value for name, value in metrics.items() if value is not None}
        lines.append(json.dumps({"step": step, **kept}))
    folder.mkdir()
    (folder / METRICS_FILE).write_text("\n".join(lines))
    (folder / "texts").mkdir()
    for step, text in ((1, "4"), (2, output)):
        (folder / f"texts/{step}.jsonl").write_text(json.dumps(ROW | {"output": text}))
    weights = {"layer.weight": torch.arange(4.0)}
    dcp.save(weights, checkpoint_id=folder / "global_step_2/actor/model", no_dist=True)
    return folder


def compare(
    tmp_path: Path, changes: dict[int, dict[str, Any]], output: str = "4"
) -> RunDifferences:
    """Compares a run with one that was changed."""
    old = write_run(tmp_path / "old", changes={})
    new = write_run(tmp_path / "new", changes=changes, output=output)
    return compare_runs(old, new, last_step=2)


def test_runs_that_differ_in_time_alone_are_equal(tmp_path: Path) -> None:
    found = compare(tmp_path, {1: {"timing_s/step": 9.0}})
    assert found.differences == found.new == found.gone == []
    assert found.compared == {"steps": 2, "metrics": 2, "texts": 2, "tensors": 1}


def test_what_differs_first_is_named_first(tmp_path: Path) -> None:
    found = compare(tmp_path, {2: {"actor/pg_loss": 0.5000001}}, output="5")
    assert found.differences == [
        "step 2, texts/2, row 0, output: old '4', new '5'",
        "step 2, actor/pg_loss: old 0.5, new 0.5000001",
    ]


def test_a_metric_that_one_run_alone_has_is_listed(tmp_path: Path) -> None:
    changed = {"critic/score/mean": None, "actor/fresh": 1.0}
    found = compare(tmp_path, {1: changed, 2: changed})
    assert found.differences == []
    assert found.new == ["actor/fresh"]
    assert found.gone == ["critic/score/mean"]


def test_a_metric_that_one_step_alone_lacks_is_a_difference(tmp_path: Path) -> None:
    found = compare(tmp_path, {2: {"critic/score/mean": None}})
    assert found.differences == ["step 2, critic/score/mean: old 1.0, new None"]


def test_a_step_that_one_run_alone_has_is_a_difference(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", changes={})
    new = write_run(tmp_path / "new", changes={})
    first_line = (new / METRICS_FILE).read_text().splitlines()[0]
    (new / METRICS_FILE).write_text(first_line)
    assert compare_runs(old, new, last_step=2).differences == ["step 2: the new run has none"]


def test_runs_without_texts_or_tensors_are_not_called_equal(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", changes={})
    (old / "texts/1.jsonl").unlink()
    (old / "texts/2.jsonl").unlink()
    found = compare_runs(old, old, last_step=3)
    assert found.differences == ["nothing to compare: no texts, no tensors"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("timing_per_token_ms/gen", True),
        ("perf/throughput", True),
        ("agent/env_seconds/max", True),
        ("actor/grad_norm", False),
        ("canary/lag", False),
        ("response_length/mean", False),
    ],
)
def test_time_memory_and_load_are_the_machines(name: str, expected: bool) -> None:
    assert is_of_the_machine(name) == expected


def test_tensors_are_equal_bit_by_bit() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert same_bits(torch.tensor(3.0), torch.tensor(3.0))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert not same_bits(torch.ones(2), torch.ones(1, 2))


def test_tensors_of_one_checkpoint_alone_and_those_that_differ_are_named(tmp_path: Path) -> None:
    old = {"actor/model: a": torch.zeros(2), "actor/model: b": torch.zeros(2)}
    new = {"actor/model: a": torch.tensor([0.0, 0.25]), "actor/model: c": torch.zeros(2)}
    assert list(tensor_differences(old, new)) == [
        "checkpoint, actor/model: a: they differ by 0.25 at most",
        "checkpoint, actor/model: b: the new run has none",
        "checkpoint, actor/model: c: the old run has none",
    ]


def test_a_checkpoint_is_read_with_its_optimizer(tmp_path: Path) -> None:
    for part in ("actor/model", "actor/optimizer", "critic/model"):
        dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path / part, no_dist=True)
    assert set(read_checkpoint(tmp_path)) == {
        "actor/model: x",
        "actor/optimizer: x",
        "critic/model: x",
    }


def test_a_difference_is_told_by_the_runs_line_and_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs are written in place of being made; two trees that are no checkouts are never kept."""
    trees = [tmp_path / "old", tmp_path / "new"]
    for tree in trees:
        tree.mkdir()
    run = ComparedRun(name="tiny", settings=(), starts=(2,))

    def write(tree: same_numbers.Tree, runs: list[ComparedRun]) -> None:
        output = "5" if tree.path.name == "new" else "4"
        tree.results.mkdir(parents=True)
        write_run(tree.folder(run), changes={}, output=output)
        same_numbers.keep(tree, run, [{"exit_code": 0, "seconds": 1.0}])

    monkeypatch.setattr(same_numbers, "make_missing", write)
    monkeypatch.setattr(same_numbers, "prepare", lambda *_: None)
    monkeypatch.setitem(same_numbers.RUNS, "tiny", run)
    words = [*map(str, trees), "--runs", "tiny", "--out", str(tmp_path / "out")]
    assert same_numbers.main(words) == 1
    printed = capsys.readouterr().out
    assert "tiny: DIFFERS: step 2, texts/2, row 0, output: old '4', new '5'" in printed
    assert "0 of 1 runs are equal" in printed


def test_a_run_is_made_once_for_a_commit_and_anew_with_other_settings(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "First"], check=True)
    out = tmp_path / ".git/out"
    clean = same_numbers.describe_tree(tmp_path, out, "python", again=False)
    assert clean.is_kept
    assert not same_numbers.describe_tree(tmp_path, out, "python", again=True).is_kept
    run = RUNS["hf_grpo"]
    clean.folder(run).mkdir(parents=True)
    same_numbers.keep(clean, run, [{"exit_code": 0, "seconds": 1.0}])
    assert clean.result(run) is not None
    assert clean.result(ComparedRun(name="hf_grpo", settings=("data.seed=8",))) is None
    (tmp_path / "edited.py").write_text("")
    changed = same_numbers.describe_tree(tmp_path, out, "python", again=False)
    assert not changed.is_kept and changed.results != clean.results


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_features(*run.features)) for name, run in RUNS.items()]
)
def test_every_run_is_a_config_that_the_loader_takes(name: str, tmp_path: Path) -> None:
    run = RUNS[name]
    config = load_config(run.argv(tmp_path, tmp_path, 3), check=False).config
    assert config.trainer.deterministic
    assert config.trainer.total_training_steps == 3
