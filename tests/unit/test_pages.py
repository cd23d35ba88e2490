"""What every page of the docs keeps to: length, beginning, links and the files that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import PROJECT

PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]
MOST_WORDS = 1200
# So many lines down a reader has seen a command that runs.
FIRST_LINES = 25
COMMAND = re.compile(r"^    (\w+=\S+ )*(python|make|source) ", re.M)
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")
NAMED_FILE = re.compile(
    r"`((?:training|workers|custom|features|contrib|data|examples|scripts|configs|tests)/[\w/]+\.\w+)`"
)


def anchors(page: Path) -> set[str]:
    """Lists what links to a page's headings end with, as GitHub makes them."""
    titles = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# A table of names, which is as long as they are many.
TABLES = ("verl_names.md",)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in TABLES], ids=lambda page: page.name
)
def test_a_page_is_short_and_begins_with_a_command(page: Path) -> None:
    text = page.read_text()
    assert len(text.split()) < MOST_WORDS
    beginning = "\n".join(text.splitlines()[:FIRST_LINES])
    assert COMMAND.search(beginning), "no command that runs at the beginning"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_points_to_is_there(page: Path) -> None:
    text = page.read_text()
    for file, anchor in LINK.findall(text):
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not anchor or anchor in anchors(target), f"{file}#{anchor}"
    assert [file for file in NAMED_FILE.findall(text) if not (PROJECT / file).exists()] == []


def test_the_readme_names_every_page() -> None:
    readme = (PROJECT / "README.md").read_text()
    assert [page.name for page in PAGES[1:] if f"docs/{page.name})" not in readme] == []
