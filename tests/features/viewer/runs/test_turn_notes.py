"""Notes beside turns in a real browser: hundreds of rows, hostile texts, narrow windows, speed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from features.shared.turn_notes import NotedEpisode, NotedPage, TurnNote, TurnNotes
from scripts.browser import Browser
from tests.features.viewer.runs.test_viewer_hostile import HOSTILE
from tests.made_episodes import Made, make_run
from tests.viewer_data import make_viewer
from tests.viewer_pages import open_viewer, show

pytestmark = pytest.mark.browser
MANY = 220
COLUMNS = [("branch", "its number"), ("return", "what it earned"), ("it says", "its words")]
EPISODE = "#episode/0/train/1/episode-1-0-0"


class Branches(TurnNotes):
    """Tells of hundreds of rows at the first turn, and of hostile texts at the second."""

    def of(self, episode: NotedEpisode) -> Sequence[TurnNote]:
        many = [[number, 1 / number, f"words {number}"] for number in range(1, MANY + 1)]
        hostile = [[number, "", text] for number, text in enumerate(HOSTILE)]
        return [
            TurnNote(turn=0, title="many", line="a line", columns=COLUMNS, rows=many),
            TurnNote(
                turn=1,
                title=HOSTILE[0],
                line="".join(HOSTILE),
                columns=COLUMNS,
                rows=hostile,
                remark="".join(HOSTILE),
            ),
            TurnNote(turn=2, title="no table", line="nothing to open"),
        ]


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The viewer of a run of which a feature tells, and its page beside the viewer."""
    folder = tmp_path_factory.mktemp("noted")
    make_run(folder, Made(steps=1))
    (folder / "credit").mkdir()
    (folder / "credit/it is.html").write_text("<title>here</title>")
    notes = Branches(pages=[NotedPage(HOSTILE[1], folder / "credit/it is.html")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("features.viewer.build.open_turn_notes", lambda *_: ({"told": notes}, []))
        make_viewer(folder)
    yield folder / "viewer"


def open_notes(browser: Browser) -> None:
    """Opens all notes of the page."""
    browser.run("document.querySelectorAll('.turn-note').forEach((note) => { note.open = true; })")
    browser.wait("document.querySelector('.turn-note tbody tr')")


def test_rows_are_made_when_a_note_is_opened_and_more_when_asked_for(
    noted: Path, browser: Browser
) -> None:
    open_viewer(browser, (noted / "index.html").as_uri() + EPISODE)
    assert browser.texts(".turn-note tbody tr") == []
    assert browser.texts(".turn-note summary")[0].startswith("many ")
    browser.click(".turn-note summary")
    browser.wait("document.querySelectorAll('.turn-note tbody tr').length == 50")
    assert browser.texts(".turn-note tbody tr")[1] == "20.5words 2"
    [more] = browser.texts(".turn-note button:not([hidden])")
    assert more == f"… {MANY - 50} more"
    for _ in range(4):
        browser.click(".turn-note button")
    assert len(browser.texts(".turn-note tbody tr")) == MANY
    assert browser.run("return document.querySelector('.turn-note button').hidden")
    assert browser.console() == []


@pytest.mark.parametrize("width", [1400, 620, 390])
def test_hostile_texts_are_text_and_nothing_is_wider_than_the_page(
    noted: Path, browser: Browser, width: int
) -> None:
    browser.resize(width, 800)
    browser.requests()
    browser.console()
    open_viewer(browser, (noted / "index.html").as_uri() + EPISODE)
    open_notes(browser)
    assert browser.run("return document.documentElement.scrollWidth - innerWidth") <= 0
    script = """return [...document.querySelectorAll(".turn-note")]
        .map((note) => note.scrollWidth - note.clientWidth)"""
    assert max(browser.run(script)) <= 0
    assert browser.run("return window.hit") is None
    for element in ("img", "iframe", "base", "object", "embed", "form"):
        assert browser.texts(element) == []
    text = "".join(browser.texts(".turn-note td"))
    assert "⟨RLO⟩evil⟨PDF⟩" in text and "nul ⟨NUL⟩ bell ⟨BEL⟩" in text and HOSTILE[0] in text
    assert not any(ord(character) in (0x202E, 0x200B, 0x2066, 0) for character in text)
    folder = noted.as_uri()
    assert [url for url in browser.requests() if not url.startswith((folder, "about:"))] == []
    assert browser.console() == []


def test_the_head_links_to_pages_of_the_run(noted: Path, browser: Browser) -> None:
    open_viewer(browser, (noted / "index.html").as_uri())
    assert browser.texts("#top .of-run") == [HOSTILE[1]]
    browser.click("#top .of-run")
    browser.wait("document.title == 'here'")


def test_an_address_names_a_turn(noted: Path, browser: Browser) -> None:
    browser.resize(1400, 300)
    open_viewer(browser, (noted / "index.html").as_uri() + EPISODE + "?turn=3")
    browser.wait("window.scrollY > 0")
    script = "return document.querySelector('.bubble[data-turn=\"3\"]').getBoundingClientRect().top"
    assert 0 <= browser.run(script) < 300
    for odd in ("99", "x", "", "1e1", '"]'):
        show(browser, f"{EPISODE}?turn={odd}")
        assert browser.texts(".fault") == []


def test_an_episode_of_many_branches_opens_soon(tmp_path: Path, browser: Browser) -> None:
    class Eight(TurnNotes):
        def of(self, episode: NotedEpisode) -> Sequence[TurnNote]:
            rows = [[number, 0.5, "w" * 160] for number in range(8)]
            return [
                TurnNote(turn=turn, title="8", line="", columns=COLUMNS, rows=rows)
                for turn in range(10)
            ]

    make_run(tmp_path, Made(steps=1, turns=10, tokens=200))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("features.viewer.build.open_turn_notes", lambda *_: ({"8": Eight()}, []))
        viewer = make_viewer(tmp_path)
    open_viewer(browser, (viewer / "index.html").as_uri())
    seconds = []
    for member in range(4):
        started = time.monotonic()
        show(browser, f"#episode/0/train/1/episode-1-{member}-0")
        seconds.append(time.monotonic() - started)
        assert len(browser.texts(".turn-note")) == 10
    print(f"opened in {min(seconds):.3f} to {max(seconds):.3f} s")
    # About 0.05 s on a machine that has nothing else to do.
    assert min(seconds) < 3
