"""The site of the docs: every page is in its navigation, links lead to what stands there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.docs_api import API_PAGES, TITLES
from scripts.docs_check import faults, wide_pages
from scripts.docs_links import (
    feature_pages,
    is_of_absent_feature,
    linked_files,
    page_of,
    rewritten,
    source_page,
    with_links_turned,
)
from scripts.docs_pages import MOVED, write_pages
from scripts.docs_tables import settings_page, type_words
from tests.conftest import PROJECT
from training.config.leaves import leaves
from training.config.schema.ppo import PPOConfig
from training.config.section import Fraction, PositiveInt, PositiveOrMinusOne
from training.config.values import as_text

DOCS = PROJECT / "docs"


class SiteLoader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name functions of packages that only `make docs` installs."""


SiteLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, tag, node: None)


def pages_in(entry: Any) -> list[str]:
    """Lists the pages of an entry of the navigation and of those below it."""
    if isinstance(entry, str):
        return [entry]
    if isinstance(entry, dict):
        entry = list(entry.values())
    return [page for part in entry for page in pages_in(part)]


def navigation() -> list[str]:
    return pages_in(yaml.load((PROJECT / "mkdocs.yml").read_text(), SiteLoader)["nav"])


def test_every_page_of_the_docs_is_in_the_navigation_once() -> None:
    in_docs = [page for page in navigation() if "/" not in page]
    assert sorted(in_docs) == sorted(page.name for page in DOCS.glob("*.md")), (
        "a new page of docs/ gets a line under `nav` in mkdocs.yml"
    )


def test_the_navigation_names_no_page_that_is_not_made() -> None:
    made = {page_of(file) for file in linked_files()}
    made |= {f"api/{name}.md" for name in (*API_PAGES, "settings")}
    made |= {page_of(page) for page in feature_pages()}
    named = {page for page in navigation() if "/" in page}
    assert {page for page in named if not is_of_absent_feature(PROJECT / page)} <= made
    assert {page for page in navigation() if page.startswith("api/")} == {
        page for page in made if page.startswith("api/")
    }


def test_the_modules_of_the_reference_are_there_and_stand_on_one_page() -> None:
    modules = [module for page in API_PAGES.values() for module in page]
    assert len(modules) == len(set(modules))
    files = [PROJECT / f"{module.replace('.', '/')}.py" for module in modules]
    assert [file for file in files if not file.is_file()] == []
    assert list(TITLES) == list(API_PAGES)


@pytest.mark.parametrize(
    ("file", "page"),
    [
        ("docs/tools.md", "tools.md"),
        ("features/chat/README.md", "features/chat/README.md"),
        ("features/viewer/img/gallery_list.png", "features/viewer/img/gallery_list.png"),
        ("features/chat/chat.py", "project/features/chat/chat.py.md"),
        ("README.md", "project/README.md"),
        ("configs/agent.yaml", "project/configs/agent.yaml.md"),
        ("configs/ppo_trainer.yaml", "api/settings.md"),
        ("custom/env.py", "api/environments.md#custom.env"),
        ("custom/tools/__init__.py", "project/custom/tools/__init__.py.md"),
    ],
)
def test_a_file_has_one_place_on_the_site(file: str, page: str) -> None:
    assert page_of(PROJECT / file) == page


def test_links_lead_to_the_same_files_on_the_site() -> None:
    text = (
        "[a](../README.md#the-docs) [b](tools.md) [c](../custom/env.py) [d](absent.md) "
        "[e](https://example.org/../README.md) [f](#here) [g](../../outside.md)"
    )
    assert with_links_turned(text, DOCS / "page.md") == (
        "[a](project/README.md#the-docs) [b](tools.md) [c](api/environments.md#custom.env) "
        "[d](absent.md) [e](https://example.org/../README.md) [f](#here) [g](../../outside.md)"
    )


def test_links_of_the_readme_lead_back_into_the_docs() -> None:
    text = rewritten(PROJECT / "README.md")
    assert "](../tutorial.md)" in text
    assert "](configs/agent.yaml.md)" in text
    assert "](docs/" not in text


def test_links_of_a_features_page_lead_to_the_same_files_on_the_site() -> None:
    page = PROJECT / "features/chat/README.md"
    text = "[a](../../docs/tools.md#parsers) [b](../../README.md) [c](../../features/__init__.py)"
    assert with_links_turned(text, page) == (
        "[a](../../tools.md#parsers) [b](../../project/README.md) "
        "[c](../../project/features/__init__.py.md)"
    )
    for other in feature_pages():
        name = os.path.relpath(other, page.parent)
        assert with_links_turned(f"[a]({name}#x)", page) == f"[a]({name}#x)"


def test_only_the_words_are_left_of_a_link_into_a_feature_that_is_not_here() -> None:
    text = "[absent](../features/absent/README.md#x), [file](../features/__init__.py)"
    assert with_links_turned(text, DOCS / "page.md") == (
        "absent, [file](project/features/__init__.py.md)"
    )
    for page in feature_pages():
        name = page.relative_to(PROJECT)
        assert with_links_turned(f"[page](../{name})", DOCS / "page.md") == f"[page]({name})"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the site is built from."""
    out = tmp_path_factory.mktemp("site") / "source"
    write_pages(out)
    return out


def test_a_page_that_has_moved_leads_to_its_place_and_keeps_the_anchor(source: Path) -> None:
    for old, now in MOVED.items():
        assert not (DOCS / f"{old}.md").exists(), f"{old} has not moved"
        if is_of_absent_feature(PROJECT / now):
            assert not (source / f"{old}.html").exists()
            continue
        written = (source / f"{old}.html").read_text()
        (to,) = re.findall(r'location\.replace\("(.*)" \+ location\.hash\)', written)
        assert f"url={to}" in written
        page = to.replace("index.html", "README.md").replace(".html", ".md")
        assert (source / page).read_text() == rewritten(PROJECT / now)


def test_the_site_lists_every_feature_with_a_page(source: Path) -> None:
    listed = re.findall(r"(?m)^- \[.+\]\((features/.+)\)$", (source / "features.md").read_text())
    pages = [page for page in feature_pages() if page.name == "README.md"]
    assert listed == [page_of(page) for page in pages]
    assert all((source / page).is_file() for page in listed)


def test_a_listing_shows_the_whole_file_with_its_fences() -> None:
    file = PROJECT / "examples/custom_algorithm.py"
    page = source_page(file)
    assert page.startswith("# examples/custom_algorithm.py\n\n````python\n")
    assert file.read_text().rstrip() in page


def test_the_page_of_settings_has_each_with_its_default() -> None:
    rows = {line.split('"')[1]: line for line in settings_page().splitlines() if "<a id=" in line}
    settings = dict(leaves(PPOConfig()))
    assert list(rows) and set(rows) == set(settings)
    for key, leaf in settings.items():
        default = as_text(leaf.value)
        assert not default or f"| `{default}` |" in rows[key]
        # Cells: bars within a text would make more of them.
        assert rows[key].replace("\\|", "").count("|") == 5


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (PositiveInt, "int > 0"),
        (PositiveInt | None, "int > 0, or null"),
        (Fraction, "float ≥ 0, ≤ 1"),
        (PositiveOrMinusOne, "int ≥ 1, or -1"),
        (tuple[str, ...], "list of text"),
        (tuple[Fraction, Fraction], "[float ≥ 0, ≤ 1, float ≥ 0, ≤ 1]"),
        (bool, "true, false"),
    ],
)
def test_a_type_is_described_with_its_bounds(kind: Any, words: str) -> None:
    assert type_words(kind) == words


def site_with(folder: Path, body: str) -> Path:
    (folder / "other.html").write_text('<h2 id="there">There</h2>')
    (folder / "index.html").write_text(f"<html><body>{body}</body></html>")
    return folder


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<script src="https://unpkg.com/x"></script>', "loads https://unpkg.com/x"),
        ('<link rel="preload stylesheet" href="//cdn.example/x.css">', "loads //cdn.example/x.css"),
        ('<img src="https://example.org/x.png">', "loads https://example.org/x.png"),
        ('<a href="absent.html">x</a>', "absent.html, which is not there"),
        ('<a href="other.html#where">x</a>', "whose anchor is not there"),
        ('<a href="#where">x</a>', "whose anchor is not there"),
        ("<p>text\n- one\n- two</p>", "'- one'"),
        ("<p>| a | b |\n|---|---|</p>", "'| a | b |'"),
        ("<p>```python</p>", "'```python'"),
    ],
)
def test_a_fault_of_the_built_site_is_named(tmp_path: Path, body: str, fault: str) -> None:
    (found,) = faults(site_with(tmp_path, body))
    assert found.startswith("index.html") and fault in found


def test_a_style_sheet_may_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "x.css").write_text("a { background: url('https://example.org/a.png') }")
    assert list(faults(site_with(tmp_path, ""))) == [
        "x.css loads https://example.org/a.png from another server"
    ]


def test_a_sound_site_has_no_fault(tmp_path: Path) -> None:
    body = (
        '<a href="other.html#there">x</a><a href="https://example.org">y</a>'
        '<link rel="canonical" href="https://example.org"><p><code>| a | b |</code> and - so on</p>'
    )
    assert list(faults(site_with(tmp_path, body))) == []
    assert list(faults(tmp_path / "empty")) == [f"{tmp_path / 'empty'} holds no page"]


@pytest.mark.seconds
@pytest.mark.browser
def test_a_page_that_a_phone_scrolls_sideways_is_told(tmp_path: Path) -> None:
    head = "<!doctype html><meta charset=utf-8><body style='margin: 0'>"
    (tmp_path / "fits.html").write_text(f"{head}<p>{'words ' * 200}")
    (tmp_path / "wide.html").write_text(f"{head}<p style='width: 420px'>wide")
    (tmp_path / "moved.html").write_text("<meta http-equiv=refresh content='0; url=wide.html'>")
    assert list(wide_pages(tmp_path)) == ["wide.html is 420 pixels wide on a phone of 390"]
