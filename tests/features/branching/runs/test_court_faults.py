"""Faults of a court: each costs itself, and ends in a count or a sentence."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from main import run
from tests.conftest import PROJECT
from tests.features.branching.runs.test_branching_runs import train, words
from tests.features.branching.runs.test_judging_runs import judge
from training.run.run_lock import run_lock
from training.run.signals import EndingSignals

ESTIMATORS = PROJECT / "tests/features/branching/faulty_estimators.py"
RIGHT = ("grpo", "turn_return")
WRONG = ("raises", "nan", "narrow", "huge", "overwrites", "of_continuations")
pytestmark = pytest.mark.seconds


def result_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "credit/model/credit.json").read_text())


@pytest.fixture(scope="module")
def right(tiny_game: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a court of 12 episodes over estimators that are right."""
    folder = tmp_path_factory.mktemp("right")
    assert judge(tiny_game, folder, "--episodes", "12", "--estimators", ",".join(RIGHT)) == 0
    return folder


def test_an_estimator_that_fails_costs_its_own_judgement_alone(
    right: Path, tiny_game: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = f"custom_algorithm={ESTIMATORS}"
    names = ",".join((*WRONG, *RIGHT))
    assert judge(tiny_game, tmp_path, own, "--episodes", "12", "--estimators", names) == 0
    told = capsys.readouterr().out
    result = result_of(tmp_path)
    assert set(result["failed"]) == {"raises", "nan", "narrow", "huge"}
    for name, why in (("raises", "without an end"), ("nan", "not finite"), ("narrow", "of shape")):
        assert f"not judged: {name}: it failed in 2 of 2 batches" in told
        assert why in result["failed"][name]
    assert set(result["estimators"]) == {*RIGHT, "overwrites", "of_continuations"}
    wanted = result_of(right)["estimators"]
    assert {name: result["estimators"][name] for name in RIGHT} == wanted


def test_what_an_estimator_keeps_goes_from_batch_to_batch_and_from_call_to_call(
    tiny_game: Path, tmp_path: Path
) -> None:
    for episodes in ("8", "24"):
        asked = ("--episodes", episodes, "--estimators", "remembers")
        assert judge(tiny_game, tmp_path, f"custom_algorithm={ESTIMATORS}", *asked) == 0
    lines = (tmp_path / "credit/model/judged.jsonl").read_text().splitlines()
    given = [set(json.loads(line)["credit"]["remembers"]) for line in lines]
    assert given == [{1.0}, {2.0}, {3.0}]


def test_a_court_whose_estimators_all_fail_ends_with_1(
    tiny_game: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = f"custom_algorithm={ESTIMATORS}"
    assert judge(tiny_game, tmp_path, own, "--episodes", "12", "--estimators", "raises,nan") == 1
    assert "no estimator can be judged" in capsys.readouterr().err


def test_too_few_tasks_are_refused_before_anything_is_played(
    tiny_game: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    assert judge(tiny_game, tmp_path, *few, "--episodes", "4") == 2
    assert "are of 2 tasks, and the intervals need 3: give --episodes 6" in capsys.readouterr().err
    assert not (tmp_path / "credit").exists()


@pytest.mark.parametrize("cls", ["Even", "Short"])
def test_returns_that_are_all_alike_and_episodes_of_one_turn_are_judged(
    cls: str, tiny_game: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judge(tiny_game, tmp_path, "--episodes", "12", cls=cls) == 0
    told = capsys.readouterr().out
    assert "nan" not in told.lower()
    if cls == "Even":
        assert "no estimator can be judged; take more episodes" in told


def test_a_line_that_is_broken_off_is_judged_again(
    right: Path, tiny_game: Path, tmp_path: Path
) -> None:
    shutil.copytree(right, tmp_path / "run")
    out = tmp_path / "run/credit/model"
    asked = ("--episodes", "12", "--estimators", ",".join(RIGHT), "--out", str(tmp_path / "out"))
    assert judge(tiny_game, tmp_path / "run", *asked) == 0
    judged = tmp_path / "out/judged.jsonl"
    whole = judged.read_bytes()
    assert whole == (out / "judged.jsonl").read_bytes()
    for cut in (whole[:-1], whole[:-40], whole[: whole.index(b"\n") // 2], b"\n" + whole, b"\xff"):
        judged.write_bytes(cut)
        assert judge(tiny_game, tmp_path / "run", *asked) == 0
        assert judged.read_bytes().rstrip(b"\n") == whole.rstrip(b"\n")


def test_an_estimator_that_was_edited_is_judged_anew(
    tiny_game: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = tmp_path / "mine.py"
    text = ESTIMATORS.read_text().replace('"of_continuations"', '"edited"')
    for name in (*WRONG[:-1], "remembers"):
        text = text.replace(f'("{name}"', f'("edited_{name}"')
    mine.write_text(text)
    asked = (f"custom_algorithm={mine}", "--episodes", "12", "--estimators", "edited,grpo")
    assert judge(tiny_game, tmp_path, *asked) == 0
    before = (tmp_path / "credit/model/judged.jsonl").read_text()
    mine.write_text(text + "\n# edited\n")
    assert judge(tiny_game, tmp_path, *asked) == 0
    assert "was judged for another question" in caplog.text
    assert (tmp_path / "credit/model/judged.jsonl.old").read_text() == before


def test_a_full_disk_costs_the_batch_that_was_played(
    right: Path, tiny_game: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = ("--episodes", "8", "--estimators", ",".join(RIGHT))
    assert judge(tiny_game, tmp_path, *one) == 0
    judged = tmp_path / "credit/model/judged.jsonl"
    before = judged.read_bytes()
    two = ("--episodes", "12", "--estimators", ",".join(RIGHT))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Less than a second batch takes, and more than all other files.
    judged.write_bytes(before)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))
    try:
        assert judge(tiny_game, tmp_path, *two) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in capsys.readouterr().err
    assert judged.read_bytes() == before
    assert judge(tiny_game, tmp_path, *two) == 0
    assert result_of(tmp_path)["estimators"] == result_of(right)["estimators"]


def test_a_checkpoint_of_another_model_and_a_runs_own_folder_are_refused(
    tiny_game: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grpo = ("algorithm.adv_estimator=grpo", "trainer.save_freq=1")
    assert train(words(tiny_game, tmp_path, *grpo, steps=1)) == 0
    episodes = (tmp_path / "episodes/1.jsonl").read_bytes()
    smaller = "+actor_rollout_ref.model.override_config.num_hidden_layers=1"
    asked = ["--judge-credit", str(tmp_path / "global_step_1"), "--episodes", "12"]
    argv = [*words(tiny_game, tmp_path), *asked, "--samples", "2", "--estimators", "grpo"]
    assert run([*argv, smaller], EndingSignals()) in (1, 2, 3)
    told = capsys.readouterr().err
    assert "global_step_1" in told and "Traceback" not in told
    assert run([*argv, "--out", str(tmp_path)], EndingSignals()) == 2
    assert "is the folder of a training run: name another" in capsys.readouterr().err
    assert (tmp_path / "episodes/1.jsonl").read_bytes() == episodes


def test_continuations_that_fail_are_counted(
    tiny_game: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAULT", "raise")
    monkeypatch.setenv("RESTORES", "0")
    more = ("agent.max_refills=0", "agent.on_failure=mask", "--episodes", "24", "--samples", "4")
    code = judge(tiny_game, tmp_path, *more, cls="LateFaults")
    told = capsys.readouterr()
    assert code == 0, told.err
    result = result_of(tmp_path)
    assert 0 < result["continuations_left_out"] < result["continuations"]
    assert f"left out: {result['continuations_left_out']} of" in told.out


def test_a_bound_on_trained_continuations_does_not_cut_what_measures(
    right: Path, tiny_game: Path, tmp_path: Path
) -> None:
    bound = ("branching.max_tokens=1", "--episodes", "12", "--estimators", ",".join(RIGHT))
    assert judge(tiny_game, tmp_path, *bound) == 0
    assert result_of(tmp_path) == result_of(right)


def test_a_court_at_work_keeps_others_out_of_its_folder(
    tiny_game: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_lock(tmp_path / "out"):
        assert judge(tiny_game, tmp_path, "--episodes", "12", "--out", str(tmp_path / "out")) == 2
    assert "is held by a court at work" in capsys.readouterr().err
