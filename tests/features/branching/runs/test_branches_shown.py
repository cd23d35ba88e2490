"""Branches of a run, and the credit that a court measured, in records and in a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from main import run
from scripts.browser import Browser
from tests.features.branching.runs.test_branching_runs import VINE, facts, train, words
from training.run.signals import EndingSignals

viewer_data = pytest.importorskip("tests.viewer_data")
viewer_pages = pytest.importorskip("tests.viewer_pages")
hostile_texts = pytest.importorskip("tests.features.viewer.runs.test_viewer_hostile")
made_episodes = pytest.importorskip("tests.made_episodes")

__all__ = ["facts"]
COURT = ("--episodes", "24", "--samples", "2", "--estimators", "grpo,turn_return")


@pytest.fixture(scope="module")
def shown(tiny_game: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, over whose first checkpoint a court was held, and its viewer."""
    folder = tmp_path_factory.mktemp("shown")
    assert train(words(tiny_game, folder, *VINE, "trainer.save_freq=1")) == 0
    argv = [*words(tiny_game, folder), "--judge-credit", f"{folder}/global_step_1", *COURT]
    assert run(argv, EndingSignals()) == 0
    viewer_data.make_viewer(folder)
    return folder


def recorded(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"episodes/{name}.jsonl").open()]


@pytest.mark.seconds
def test_a_record_has_the_branches_that_were_measured(
    tiny_game: Path, tmp_path: Path, facts: list[dict[str, Any]]
) -> None:
    assert train(words(tiny_game, tmp_path, *VINE, steps=1)) == 0
    records = recorded(tmp_path, "1")
    assert len(records) == len(facts) == 8
    compared = 0
    for record, fact in zip(records, facts, strict=True):
        returns: list[list[float]] = [[] for _ in record["turns"]]
        for branch in record.get("branches", {"listed": []})["listed"]:
            returns[branch["turn"]].append(branch["return"])
            if branch["differs"] is not None:
                turn, place = branch["differs"]
                own = record["turns"][turn]["text"] if turn < len(record["turns"]) else ""
                assert branch["words"] != own[place:] or not own[place:]
            compared += 1
        assert returns == fact["branches"]["returns"]
        if "branches" in record:
            assert record["branches"]["own_returns"][0] == pytest.approx(record["reward"])
    assert compared > 8


@pytest.mark.seconds
def test_a_run_without_branches_records_none(tiny_game: Path, tmp_path: Path) -> None:
    assert train(words(tiny_game, tmp_path, steps=1)) == 0
    assert all("branches" not in record for record in recorded(tmp_path, "1"))
    viewer = viewer_data.make_viewer(tmp_path)
    assert not any("notes" in page for page, _ in viewer_data.pages(viewer).values())


@pytest.mark.seconds
def test_credit_stands_at_the_runs_own_episodes_where_the_court_played_the_same(
    shown: Path,
) -> None:
    judged = json.loads((shown / "credit/global_step_1/judged.jsonl").read_text().splitlines()[0])
    assert judged["step"] == 2
    of_court = {entry["episode_id"] for entry in judged["episodes"]}
    made = viewer_data.pages(shown / "viewer")
    told = {
        name
        for name, (page, _) in made.items()
        if any(note["title"] == "credit, global_step_1" for note in page.get("notes", []))
    }
    # The run is deterministic: with the checkpoint's weights its next step is the court's first.
    assert told == of_court and told
    for name in told:
        page, _ = made[name]
        notes = [note for note in page["notes"] if note["title"].startswith("credit")]
        assert [note["turn"] for note in notes] == list(range(len(page["turns"])))
        assert {row[0] for row in notes[0]["rows"]} == {"grpo", "turn_return"}
    [[text, address]] = viewer_data.manifest(shown / "viewer")["pages"]
    assert text == "credit judged: global_step_1"
    assert (shown / "viewer" / address).is_file()


@pytest.mark.browser
@pytest.mark.seconds
def test_the_courts_page_leads_to_the_turn_with_its_credit_and_branches(
    shown: Path, browser: Browser
) -> None:
    court = shown / "credit/global_step_1"
    browser.console()
    browser.open((court / "credit.html").as_uri())
    link = browser.run("return document.querySelector('details a[href*=viewer]').href")
    viewer_pages.open_viewer(browser, link)
    assert browser.texts(".fault") == []
    [*lines] = browser.texts(".turn-note summary")
    assert any("noisy" in line and "by its two halves" in line for line in lines)
    assert any(line.startswith("2 branches") for line in lines)
    turn = int(link.rsplit("=", 1)[1])
    assert browser.texts(f'.bubble[data-turn="{turn}"]')
    assert "#" not in "".join(browser.texts(".bubble.policy .said")), "ids are shown as text"
    assert browser.console() == []


@pytest.mark.browser
@pytest.mark.seconds
def test_whatever_branches_say_is_text_and_damage_costs_them_alone(
    tmp_path: Path, browser: Browser
) -> None:
    def told(branches: object) -> dict[str, object]:
        return {"branches": {"listed": branches, "not_listed": 0, "own_returns": [1.0] * 3}}

    changes = {}
    for number, text in enumerate(hostile_texts.HOSTILE):
        entry = {"turn": 1, "word": text, "return": 0.5, "ending": text, "left_out": text}
        entry |= {"turns": 1, "tokens": 4, "differs": [1, 0], "words": text}
        changes[f"episode-1-{number}-0"] = told([entry] * 9)
    damaged = [[{}], [None], "text", [{"turn": 1e400}], {"a": 1}]
    for number, branches in enumerate(damaged):
        changes[f"episode-1-{number}-1"] = told(branches)
    made = made_episodes.Made(
        steps=1, groups=len(hostile_texts.HOSTILE), members=2, changes=changes
    )
    made_episodes.make_run(tmp_path, made)
    viewer = viewer_data.make_viewer(tmp_path)
    shown = viewer_data.pages(viewer)
    assert len(shown) == 2 * len(hostile_texts.HOSTILE)
    for number in range(len(damaged)):
        [fault] = shown[f"episode-1-{number}-1"][0]["faults"]
        assert "what features/branching tells of it cannot be shown" in fault
    browser.resize(390, 800)
    viewer_pages.open_viewer(browser, (viewer / "index.html").as_uri())
    browser.requests()
    browser.console()
    for number in range(len(hostile_texts.HOSTILE)):
        viewer_pages.show(browser, f"#episode/0/train/1/episode-1-{number}-0")
        browser.run("document.querySelector('.turn-note').open = true")
        browser.wait("document.querySelectorAll('.turn-note tbody tr').length == 9")
        assert browser.run("return document.documentElement.scrollWidth - innerWidth") <= 0
        assert browser.run("return window.hit") is None
        for name in ("img", "iframe", "base", "object", "embed", "form"):
            assert browser.texts(name) == []
    assert [url for url in browser.requests() if not url.startswith(viewer.as_uri())] == []
    assert browser.console() == []
