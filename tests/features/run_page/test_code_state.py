"""With which code a run was made: its digest, its diff, and runs that differ in it alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from features.run_page import observer
from features.run_page.code_state import DIFF, code_digest, write_diff
from features.run_page.events import read_events
from tests.features.run_page.made_runs import content_of, event, make_run
from tests.features.run_page.test_run_record import make_record

LR = "actor_rollout_ref.actor.optim.lr"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Makes a project of two files."""
    folder = tmp_path / "project"
    (folder / "training").mkdir(parents=True)
    (folder / "main.py").write_text("print(1)\n")
    (folder / "training/loss.py").write_text("loss = 1\n")
    return folder


def test_a_digest_is_of_what_the_files_hold(project: Path) -> None:
    before = code_digest({}, project)
    assert code_digest({}, project) == before
    (project / "training/loss.py").write_text("loss = 2\n")
    assert code_digest({}, project) != before
    (project / "training/loss.py").write_text("loss = 1\n")
    assert code_digest({}, project) == before
    (project / "notes.txt").write_text("of no effect\n")
    assert code_digest({}, project) == before
    (project / "training/new.py").write_text("")
    assert code_digest({}, project) != before


@pytest.mark.parametrize("form", ["{}", "{}:Game"])
def test_files_that_settings_name_count(project: Path, tmp_path: Path, form: str) -> None:
    file = tmp_path / "game.py"
    file.write_text("reward = 1\n")
    settings = {"agent.environment.path": form.format(file), "agent.tools": [str(tmp_path)]}
    before = code_digest(settings, project)
    file.write_text("reward = 2\n")
    assert code_digest(settings, project) != before
    file.unlink()
    # Whoever has no such file is told elsewhere.
    assert code_digest(settings, project) == code_digest({}, project)


def test_what_differs_from_the_commit_lies_beside_the_run(project: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_diff(run, project)
    assert not (run / DIFF).exists()
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "first")):
        subprocess.run(["git", "-C", str(project), *words], check=True)
    write_diff(run, project)
    assert not (run / DIFF).exists()
    (project / "training/loss.py").write_text("loss = 2\n")
    write_diff(run, project)
    assert "+loss = 2" in (run / DIFF).read_text()
    (project / "training/loss.py").write_text("loss = 1\n")
    write_diff(run, project)
    assert not (run / DIFF).exists()


def made(folder: Path, seed: int, code: str | None) -> Path:
    versions = {} if code is None else {"code": code}
    return make_run(
        folder,
        [{"step": 1, "critic/score/mean": seed}],
        events=[event("start", 0, versions=versions)],
        settings=[f"data.seed={seed}", f"trainer.default_local_dir={folder}"],
    )


def test_runs_of_other_code_are_lines_of_their_own_and_the_table_says_so(tmp_path: Path) -> None:
    content = content_of(
        made(tmp_path / "a", 1, "aaa"),
        made(tmp_path / "b", 1, "bbb"),
        made(tmp_path / "c", 2, "aaa"),
        made(tmp_path / "d", 2, None),
    )
    names = [group["name"] for group in content["groups"]]
    assert names == ["code=aaa (2 seeds)", "code=bbb", "code=not recorded"]
    row = {"key": "code", "values": ["aaa", "bbb", "not recorded"]}
    assert content["differences"]["rows"] == [row]


def test_runs_of_one_seed_are_not_counted_as_seeds(tmp_path: Path) -> None:
    content = content_of(made(tmp_path / "r1", 1, "aaa"), made(tmp_path / "r2", 1, "aaa"))
    assert [group["name"] for group in content["groups"]] == ["r (2 runs)"]


def test_a_run_that_goes_on_with_other_code_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = iter(["aaa", "aaa", "bbb"])
    monkeypatch.setattr(observer, "code_digest", lambda settings: next(codes))
    for step in (0, 1, 2):
        with make_record(tmp_path, step=step) as record:
            record.run.step = step
    changes = [each for each in read_events(tmp_path / "events.jsonl") if each.get("changed")]
    assert [each["changed"] for each in changes] == [{"code": ["aaa", "bbb"]}]
