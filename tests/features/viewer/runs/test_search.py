"""A search in a real browser finds what a look through all texts finds, wherever the texts are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from features.viewer.episode_pages import episode_texts
from features.viewer.records import parse_episode
from features.viewer.search_index import code_units
from scripts.browser import Browser
from tests.made_episodes import Made, make_run
from tests.viewer_data import make_viewer
from tests.viewer_pages import ALL_KEPT, open_viewer, searched

pytestmark = pytest.mark.browser

LISTED = "return viewer.listed.rows.map((i) => viewer.table.ids[i])"


def page_of(run: Path, place: str = "") -> str:
    return (run / "viewer/index.html").as_uri() + place


# Texts in which a search may go wrong, each said by one episode after the other.
SAID = [
    "Straße, naïve, ŒUVRE, “so they say” …",
    "İstanbul ΣΊΣΥΦΟΣ, and a \U0001f600 and 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "half a character: \ud83d, and the other: \ude00",
    "one\0two: a mark within a text",
    "Plain words alone, with a BLANK at the end ",
    "aaaaaaaaaaaaaaaaaaaaaaaab",
]
ASKED = [
    "s", "SO", "ße", "œuvre", "“So They", " …", "istanbul", "İSTANBUL", "σίσυφος", "ΣΊΣΥΦΟΣ",
    "\U0001f600", "\ud83d", "\ude00", "𝔲", "one two", "e\0t", "wo: a mark", "with a blank at",
    "end episode-", "a" * 24 + "b", "a" * 25, "nowhere at all", "find the word", "oom 3",
    "blank at the", "episode-3-3-1",
]  # fmt: skip


@pytest.fixture(scope="module")
def odd_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, list[str]]]]:
    """A run whose episodes say SAID, and its ids and texts."""
    folder = tmp_path_factory.mktemp("odd")
    make_run(folder, Made(steps=3, initial="Find the word in room {1}."))
    said = []
    for step in (1, 2, 3):
        path = folder / f"episodes/{step}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for number, line in enumerate(lines):
            # The files of the first step are of ASCII alone.
            line["turns"][1]["text"] = SAID[number % len(SAID)] if step > 1 else SAID[-1]
            said.append((line["episode_id"], episode_texts(parse_episode(dumped(line)))))
        path.write_bytes(b"".join(map(dumped, lines)))
    make_viewer(folder)
    return folder, said


def dumped(line: dict[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"


def holding(said: list[tuple[str, list[str]]], asked: str) -> list[str]:
    """Looks through all texts, one by one, in the units that a page has."""
    wanted = in_units(asked.replace("\0", " "))
    return [name for name, texts in said if any(wanted in in_units(text) for text in texts)]


def in_units(text: str) -> str:
    return "".join(map(chr, code_units(text).tolist()))


def test_a_search_of_texts_in_memory_is_exact_and_reads_nothing(
    odd_run: tuple[Path, list[tuple[str, list[str]]]], browser: Browser
) -> None:
    folder, said = odd_run
    open_viewer(browser, page_of(folder))
    browser.wait(ALL_KEPT)
    browser.requests()
    for asked in ASKED:
        assert searched(browser, asked) == [True, holding(said, asked)], asked
    assert browser.requests() == []
    assert len(holding(said, ASKED[0])) == 48 and not holding(said, "nowhere at all")


@pytest.mark.parametrize("room", ["0", "viewer.keptTexts(1).folded.length * 3", "Infinity"])
def test_counts_are_exact_however_many_texts_are_in_memory(
    odd_run: tuple[Path, list[tuple[str, list[str]]]], browser: Browser, room: str
) -> None:
    folder, said = odd_run
    open_viewer(browser, page_of(folder, "#tasks"))
    if room.startswith("viewer"):
        browser.run_async("const done = arguments[0]; viewer.foldedTexts(1).then(() => done(1))")
    browser.run(f"viewer.mostTextBytes = {room}")
    # An address holds no half of a character.
    for asked in (text for text in ASKED if text.isprintable()):
        browser.run("location.hash = viewer.listAddress({ text: arguments[0] })", asked)
        browser.wait("viewer.listed.found?.text === arguments[0] && viewer.listed.isSettled", asked)
        browser.wait("!document.querySelector('.status').textContent.startsWith('at most')")
        assert browser.run(LISTED) == holding(said, asked), asked
    kept = browser.run("return [0, 1, 2].filter((k) => viewer.keptTexts(k)).length")
    assert kept == {"0": 0, "Infinity": 3}.get(room, 1) or room.startswith("viewer")
