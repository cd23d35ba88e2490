"""What features tell beside turns stands on the pages; what is wrong with it costs itself alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from features.shared.turn_notes import NotedEpisode, NotedPage, TurnNote, TurnNotes
from features.viewer.command import main
from features.viewer.feature import episode_address
from features.viewer.feature import make_viewer as make_viewer_of
from tests.made_episodes import Made, make_run
from tests.viewer_data import make_viewer, manifest, pages

OPENED = "features.viewer.build.open_turn_notes"


class Told(TurnNotes):
    """Tells of every turn what the policy said in it, and counts words."""

    def of(self, episode: NotedEpisode) -> Sequence[TurnNote]:
        notes = []
        for turn, said in enumerate(episode.turns):
            words = str(said["text"]).split()
            notes.append(
                TurnNote(
                    turn=turn,
                    title="words",
                    line=f"step {episode.step} {episode.kind}",
                    columns=[("word", "a word"), ("letters", "how many it has")],
                    rows=[[word, len(word)] for word in words],
                )
            )
        return notes


class Broken(TurnNotes):
    """Raises for the episodes of one group."""

    def of(self, episode: NotedEpisode) -> Sequence[TurnNote]:
        if episode.entries["uid"].endswith("-1"):
            raise RuntimeError("no note")
        return []


def opens(monkeypatch: pytest.MonkeyPatch, notes: TurnNotes, *problems: str) -> None:
    """Lets a feature have these notes."""
    monkeypatch.setattr(OPENED, lambda run_dir, episodes: ({"told": notes}, list(problems)))


def data_of(viewer: Path) -> dict[str, bytes]:
    """The bytes of all data files but what says how they were made."""
    files = [viewer / "manifest.js", *sorted((viewer / "data").rglob("*.js"))]
    return {str(file.relative_to(viewer)): file.read_bytes() for file in files}


def test_notes_stand_on_the_page_and_what_they_show_does_not_stand_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens(monkeypatch, Told(entries=("task_name", "seconds")))
    make_run(tmp_path, Made(steps=1))
    page, _ = pages(make_viewer(tmp_path))["episode-1-0-2"]
    assert [note["turn"] for note in page["notes"]] == [0, 1, 2]
    note = page["notes"][1]
    words = page["turns"][1]["text"].split()
    assert note["rows"] == [[word, len(word)] for word in words]
    assert note["line"] == "step 1 train"
    assert "seconds" not in page["facts"] and "env_seconds" in page["facts"]


def test_a_feature_that_raises_costs_its_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens(monkeypatch, Broken(entries=("seconds",)), "the court in X cannot be read")
    make_run(tmp_path, Made(steps=1))
    viewer = make_viewer(tmp_path)
    made = pages(viewer)
    assert len(made) == 16, "every episode has its page"
    for name, (page, _) in made.items():
        told = [fault for fault in page["faults"] if "no note" in fault]
        assert bool(told) == name.startswith("episode-1-1-")
        assert ("seconds" in page["facts"]) == bool(told), "what nobody shows stands with the rest"
    [fault] = manifest(viewer)["faults"]
    assert fault.endswith("the court in X cannot be read")


def test_without_notes_the_data_is_byte_for_byte_that_of_a_viewer_that_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, Made(steps=2))
    asked = data_of(make_viewer(tmp_path))
    (tmp_path / "viewer/data/state.json").unlink()
    monkeypatch.setattr(OPENED, lambda run_dir, episodes: ({}, []))
    assert data_of(make_viewer(tmp_path)) == asked
    assert not any("notes" in page for page, _ in pages(tmp_path / "viewer").values())
    assert "pages" not in manifest(tmp_path / "viewer")


def test_a_viewer_that_is_kept_is_made_anew_where_the_notes_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, Made(steps=1))
    opens(monkeypatch, TurnNotes(key="none yet"))
    monkeypatch.setattr(TurnNotes, "of", lambda self, episode: [])
    make_viewer(tmp_path)
    opens(monkeypatch, Told(key="some"))
    page, _ = pages(make_viewer(tmp_path))["episode-1-0-0"]
    assert len(page["notes"]) == 3
    assert "some" in json.loads((tmp_path / "viewer/data/state.json").read_text())["key"]


def test_pages_of_the_run_are_linked_where_the_viewer_lies_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    make_run(run, Made(steps=1))
    odd = run / "credit/a # b?/credit.html"
    opens(monkeypatch, Told(pages=[NotedPage("court", odd)]))
    make_viewer(run)
    assert manifest(run / "viewer")["pages"] == [["court", "../credit/a%20%23%20b%3F/credit.html"]]
    assert main([str(run), "--out", str(tmp_path / "elsewhere")]) == 0
    assert "pages" not in manifest(tmp_path / "elsewhere")


def test_other_features_make_a_viewer_and_name_an_episode_in_it(tmp_path: Path) -> None:
    assert "holds no episodes" in make_viewer_of(tmp_path)
    make_run(tmp_path, Made(steps=1))
    assert make_viewer_of(tmp_path) == ""
    assert (tmp_path / "viewer/index.html").is_file()
    address: Any = episode_address(3, "a/b c", 0)
    assert address == "viewer/index.html#episode/0/train/3/a%2Fb%20c?turn=1"
