"""Tables that features write for a page: shown as they are, and a damaged one costs itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from features.run_page.feature import write_table
from features.run_page.own_tables import FOLDER, MOST_ROWS, read_tables
from features.run_page.report import write_pages
from scripts.browser import Browser
from tests.features.run_page.made_runs import content_of, make_run, steps

HOSTILE = "<img src=x onerror='window.hacked = 1'>"


def write(folder: Path, name: str = "tasks", title: str = "Tasks", note: str = "") -> None:
    rows = [["row 1", 0.25, None], [HOSTILE, 3, "hard"]]
    write_table(folder, name, title=title, headings=("task", "rate", "pool"), rows=rows, note=note)


def test_a_table_is_part_of_the_page_in_the_order_of_names(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps(2))
    assert content_of(folder)["runs"][0]["tables"] == []
    write(folder, "b", title="Second")
    write(folder, "a", title="First", note="so much")
    first, second = content_of(folder)["runs"][0]["tables"]
    assert (first["title"], first["note"], second["title"]) == ("First", "so much", "Second")
    assert first["headings"] == ["task", "rate", "pool"]
    assert first["rows"] == [["row 1", 0.25, None], [HOSTILE, 3, "hard"]]
    write(folder, "a", title="Anew")
    assert content_of(folder)["runs"][0]["tables"][0]["title"] == "Anew"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        '{"headings": ["a"], "rows": [["x", "y"]]}',
        '{"headings": ["a"], "rows": "x"}',
        '{"headings": 3, "rows": []}',
        '{"rows": []}',
        "[" * 100_000,
        json.dumps({"headings": ["a"] * 50, "rows": []}),
    ],
)
def test_a_damaged_table_costs_itself(tmp_path: Path, text: str) -> None:
    write(tmp_path)
    (tmp_path / FOLDER / "bad.json").write_text(text)
    assert [table["title"] for table in read_tables(tmp_path)] == ["Tasks"]


def test_cells_are_texts_or_finite_numbers_and_rows_are_bounded(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    rows = [[float("nan"), True, {"a": 1}]] * (MOST_ROWS + 5)
    text = json.dumps({"title": 3, "headings": ["a", 2, None], "rows": rows})
    (tmp_path / FOLDER / "own.json").write_text(text)
    [table] = read_tables(tmp_path)
    assert table["title"] == "3" and table["headings"] == ["a", "2", "None"]
    assert table["rows"][0] == [None, "True", "{'a': 1}"] and len(table["rows"]) == MOST_ROWS


@pytest.mark.browser
def test_a_browser_shows_the_table_and_runs_nothing_of_it(browser: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps(3))
    write(folder, title="Tasks by difficulty", note="and 5 more")
    page, _ = write_pages([folder])
    browser.open(page.as_uri())
    browser.wait("document.documentElement.dataset.shown === 'yes'")
    section = browser.run("return document.getElementById('table0').innerText")
    assert "Tasks by difficulty" in section and "and 5 more" in section
    assert HOSTILE in section and "hard" in section
    assert browser.run("return window.hacked ?? null") is None
