"""What is told of branches and courts beside turns, worked by hand; damage costs itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from features.branching.notes import BranchNotes, branch_notes, open_notes
from features.shared.turn_notes import NotedEpisode, TurnNote

TURNS = [{"text": "go left"}, {"text": "open the left box"}]
NAME = "7.0.1"


def listed(**changes: Any) -> dict[str, Any]:
    entry = {
        "turn": 1,
        "word": "1.0",
        "return": 0.5,
        "ending": "done",
        "turns": 1,
        "tokens": 4,
        "differs": [1, 9],
        "words": "right box",
    }
    return entry | changes


def noted(turns: Any = TURNS, step: int = 7, kind: str = "train", **entries: Any) -> NotedEpisode:
    return NotedEpisode(kind=kind, step=step, episode_id=NAME, turns=turns, entries=entries)


def test_a_turns_branches_are_told_with_what_the_episode_says_there() -> None:
    branches = [
        listed(),
        listed(**{"return": 1.0, "differs": None, "words": "", "ending": "same"}),
        listed(**{"return": None, "left_out": "boom", "ending": "env_crash", "turns": 0}),
        listed(differs=[2, 0], words="", turns=3),
        listed(differs=[2, 0], words="more", turns=2),
        listed(turn=0, differs=[0, 3], words="right", turns=2),
    ]
    record = {"listed": branches, "not_listed": 4, "own_returns": [0.75, 0.25]}
    first, second = branch_notes(record, TURNS)
    assert (first.turn, first.title, first.rows) == (
        0,
        "1 branch",
        [[1, 0.5, "done", 1, "right", "left"]],
    )
    assert second.title == "5 branches"
    assert second.line == ("return 0.625 on average, 0.5 to 1; 1 left out; the episode itself 0.25")
    assert second.rows == [
        [1, 0.5, "done", 2, "right box", "left box"],
        [2, 1.0, "same", "", "(all the same)", ""],
        [3, "", "env_crash (left out: boom)", 2, "right box", "left box"],
        [4, 0.5, "done", 3, "(nothing)", "(has ended)"],
        [5, 0.5, "done", 3, "more", "(has ended)"],
    ]
    assert second.remark == "Further branches of this episode, not recorded one by one: 4."


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"listed": 3, "own_returns": []},
        {"listed": [{}], "own_returns": []},
        {"listed": [listed(turn="x")], "own_returns": [0.0]},
        {"listed": [listed(differs=[0])], "own_returns": [0.0]},
        {"listed": [listed(**{"return": "much"})], "own_returns": [0.0]},
        "branches",
        [1],
    ],
)
def test_a_damaged_record_raises_and_tells_nothing(record: Any) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError, IndexError)):
        BranchNotes().of(noted(branches=record))


def write_court(folder: Path, **changes: Any) -> None:
    """Writes a court over one episode of two turns, and one estimator of twice the size."""
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        "truth": "This task, this luck.",
        "estimators": {
            "grpo": {"slope": ["2.0", "1.0", "3.0"]},
            "odd": {"slope": ["-1", "0", "0"]},
        },
    }
    other = {"episode_id": "7.0.0", "group": "a", "rewards": [0.0], "tokens": [3]}
    entry = {"episode_id": NAME, "group": "a", "rewards": [0.0, 1.0], "tokens": [3, 3]}
    batch = {
        "step": 7,
        "episodes": [
            other | {"returns": [[0.0, 0.0]]},
            # By halves: V0 = 0, 1 and V1 = 1, 0.5.
            entry | {"returns": [[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 1.0]]},
        ],
        "texts": [["x"], [turn["text"] for turn in TURNS]],
        "credit": {"grpo": [9.0, 1.0, 0.5], "odd": [9.0, 0.0, 0.25], "failed": []},
    }
    (folder / "credit.json").write_text(json.dumps(result | changes))
    (folder / "judged.jsonl").write_text(json.dumps(batch) + "\n")
    asked = {"config": {"algorithm": {"turn_gamma": 1.0}}}
    (folder / "asked.json").write_text(json.dumps(asked))
    (folder / "credit.html").write_text("page")


def test_credit_is_measured_by_halves_beside_what_estimators_gave(tmp_path: Path) -> None:
    write_court(tmp_path / "credit/global_step_6")
    notes = open_notes(tmp_path, tmp_path / "episodes")
    first, second = notes.of(noted())
    assert first.title == "credit, global_step_6"
    # A0 = 0 + V1 - V0 = 1 and -0.5; A1 = 1 - V1 = 0 and 0.5.
    assert first.line == "measured 0.25 (noisy: 1 and -0.5 by its two halves); grpo 1, odd 0"
    assert first.rows == [["grpo", 1.0, 0.5, 0.25], ["odd", 0.0, "", ""]]
    assert second.line.startswith("measured 0.25 (noisy: 0 and 0.5 by its two halves); grpo 0.5")
    assert "4 continuations" in first.remark and first.remark.endswith("This task, this luck.")
    assert [page.file.name for page in notes.pages] == ["credit.html"] and not notes.faults


@pytest.mark.parametrize(
    "other",
    [
        noted(step=8),
        noted(kind="val"),
        noted([{"text": "go left"}, {"text": "open the box"}]),
        noted(TURNS[:1]),
    ],
)
def test_another_episode_of_the_name_has_no_credit(tmp_path: Path, other: NotedEpisode) -> None:
    write_court(tmp_path / "credit/global_step_6")
    assert open_notes(tmp_path, tmp_path / "episodes").of(other) == []


def test_a_courts_own_viewer_tells_its_credit(tmp_path: Path) -> None:
    write_court(tmp_path)
    notes: list[TurnNote] = list(open_notes(tmp_path, tmp_path / "episodes").of(noted()))
    assert [note.title for note in notes] == ["credit", "credit"]


def test_a_batch_that_is_being_written_waits(tmp_path: Path) -> None:
    court = tmp_path / "credit/at_work"
    write_court(court)
    with (court / "judged.jsonl").open("a") as file:
        file.write('{"step": 8, "episodes": [')
    notes = open_notes(tmp_path, tmp_path / "episodes")
    assert len(notes.of(noted())) == 2 and not notes.faults


@pytest.mark.parametrize("damage", ["estimators", "asked", "json", "lines", "texts", "binary"])
def test_a_damaged_court_is_a_sentence_and_costs_no_other(tmp_path: Path, damage: str) -> None:
    bad = tmp_path / "credit/bad"
    write_court(tmp_path / "credit/good")
    write_court(bad, **({damage: None} if damage == "estimators" else {}))
    if damage == "asked":
        (bad / "asked.json").unlink()
    if damage == "json":
        (bad / "credit.json").write_text("[")
    if damage == "lines":
        (bad / "judged.jsonl").write_text('{"step": 7\n')
    if damage == "texts":
        line = json.loads((bad / "judged.jsonl").read_text())
        (bad / "judged.jsonl").write_text(json.dumps(line | {"texts": [["x"]]}) + "\n")
    if damage == "binary":
        (bad / "judged.jsonl").write_bytes(b"\xff\x00" * 9 + b"\n")
    notes = open_notes(tmp_path, tmp_path / "episodes")
    [fault] = notes.faults
    assert f"the court in {bad} cannot be read" in fault
    assert [note.title for note in notes.of(noted())] == ["credit, good"] * 2


def test_the_key_changes_with_every_court(tmp_path: Path) -> None:
    keys = {open_notes(tmp_path, tmp_path).key}
    write_court(tmp_path / "credit/one")
    keys.add(open_notes(tmp_path, tmp_path).key)
    os.utime(tmp_path / "credit/one/credit.json", (1, 1))
    keys.add(open_notes(tmp_path, tmp_path).key)
    (tmp_path / "credit/unfinished").mkdir()
    keys.add(open_notes(tmp_path, tmp_path).key)
    assert len(keys) == 3, "a court that is not there yet tells nothing"
