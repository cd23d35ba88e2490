"""Every page of the docs begins with a command, and points to what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.docs_links import feature_pages, is_of_absent_feature
from tests.conftest import PROJECT

DOCS = sorted((PROJECT / "docs").glob("*.md"))
PAGES = [PROJECT / "README.md", *DOCS, *feature_pages()]
# So many lines down a reader has seen a command that runs.
FIRST_LINES = 25
COMMAND = re.compile(r"^    (\w+=\S+ )*(python|make|source) ", re.M)
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")
NAMED_FILE = re.compile(
    r"`((?:training|workers|custom|contrib|data|examples|features|scripts|configs|tests)"
    r"/[\w/]+\.\w+)`"
)
# A table of names begins with the table.
TABLES = ("features/verl/names.md",)


def name_of(page: Path) -> str:
    return str(page.relative_to(PROJECT))


def anchors(page: Path) -> set[str]:
    """Lists what links to a page's headings end with, as GitHub makes them."""
    titles = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_begins_with_a_command(page: Path) -> None:
    if name_of(page) in TABLES:
        return
    beginning = "\n".join(page.read_text().splitlines()[:FIRST_LINES])
    assert COMMAND.search(beginning), "no command that runs at the beginning"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_points_to_is_there(page: Path) -> None:
    text = page.read_text()
    for file, anchor in LINK.findall(text):
        target = (page.parent / file).resolve() if file else page
        if is_of_absent_feature(target):
            continue
        assert target.exists(), file
        assert not anchor or anchor in anchors(target), f"{file}#{anchor}"
    named = [PROJECT / file for file in NAMED_FILE.findall(text)]
    assert [file for file in named if not (file.exists() or is_of_absent_feature(file))] == []


def test_the_readme_names_every_page_of_the_docs() -> None:
    readme = (PROJECT / "README.md").read_text()
    assert [page.name for page in DOCS if f"docs/{page.name})" not in readme] == []


# A path of a page in code, settings or messages, and the anchor behind it. Pages link by paths
# from their own folder, which the test above follows.
NAMED_PAGE = re.compile(r"(?<![\w./])((?:docs|features)/[\w/]+\.md)(?:#([\w-]+))?")
# Folders that are made from other files, or that only a reader's own checkout has.
NOT_READ = {".git", ".venv", ".venv-verifiers", "outputs", "site", "shared"}
READ = {".py", ".yaml", ".yml", ".toml", ".js", ".html", ".sh", ".sbatch", ".txt", ".md", ""}


def text_files() -> list[Path]:
    """Lists the project's files of text, without what is built or installed."""
    found = []
    for entry in sorted(PROJECT.iterdir()):
        if entry.name in NOT_READ or (entry.name.startswith(".") and entry.is_dir()):
            continue
        found += [entry] if entry.is_file() else entry.rglob("*")
    return [path for path in found if path.is_file() and path.suffix in READ]


def absent_pages(text: str) -> list[str]:
    """Lists the pages, with their anchors, that a text names and that are not there."""
    absent = []
    for name, anchor in NAMED_PAGE.findall(text):
        page = PROJECT / name
        if is_of_absent_feature(page) or "NAME" in name:
            continue
        if not page.is_file():
            absent.append(name)
        elif anchor and anchor not in anchors(page):
            absent.append(f"{name}#{anchor}")
    return absent


def test_a_page_that_is_named_and_not_there_is_found() -> None:
    assert absent_pages("see docs/tools.md, docs/tools.md#parsers, features/NAME/README.md") == []
    assert absent_pages("(docs/absent.md) docs/tools.md#absent") == [
        "docs/absent.md",
        "docs/tools.md#absent",
    ]


@pytest.mark.seconds
def test_every_page_that_a_file_names_is_there() -> None:
    files = text_files()
    assert PROJECT / "training/ray_trainer.py" in files and PROJECT / "Makefile" in files
    # The tests of the site and of this file name pages that are not there.
    made_up = {Path(__file__), PROJECT / "tests/unit/test_docs_site.py"}
    absent = {}
    for file in files:
        missing = absent_pages(file.read_text(errors="replace"))
        if missing and file not in made_up:
            absent[name_of(file)] = missing
    assert absent == {}
