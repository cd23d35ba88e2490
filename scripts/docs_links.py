"""Decides where a file of the project stands on the docs' site, and turns links there.

    docs/tools.md               tools.md
    features/chat/README.md     features/chat/README.md, and so with all pages below features/
    custom/env.py               api/environments.md#custom.env, a module of the API reference
    configs/ppo_trainer.yaml    api/settings.md
    README.md                   project/README.md, and so with any other page
    configs/agent.yaml          project/configs/agent.yaml.md, the file as a listing

Invariant: a page's links are those that a forge follows, so that they work in both places.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from scripts.docs_api import API_PAGES

PROJECT = Path(__file__).resolve().parents[1]
DOCS = PROJECT / "docs"
FEATURES = PROJECT / "features"
FEATURE_TESTS = PROJECT / "tests" / "features"
README = PROJECT / "README.md"
# [text](file#anchor); a link with a colon names another server.
LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
# A whole link, with its text.
WORDS_AND_LINK = re.compile(r"\[([^\[\]]*)" + LINK.pattern)
# Files that a made page stands for.
MADE_PAGES = {"configs/ppo_trainer.yaml": "api/settings.md"}
# A feature's folder gives these to the site as they are: its pages and their pictures.
OWN_SUFFIXES = {".md", ".png"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".sbatch": "bash", ".csv": "text"}


def page_of(file: Path) -> str:
    """Returns the page of a file of the project, as a path inside the site's source.

    It has an anchor where the file is a module that stands among others on its page.
    """
    name = file.relative_to(PROJECT).as_posix()
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    if file.is_relative_to(FEATURES) and file.suffix in OWN_SUFFIXES:
        return name
    if name in MADE_PAGES:
        return MADE_PAGES[name]
    module = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    for page, modules in API_PAGES.items():
        if module in modules:
            return f"api/{page}.md#{module}"
    return f"project/{name}" if file.suffix == ".md" else f"project/{name}.md"


def feature_pages() -> list[Path]:
    """Lists the pages of the features that are here, those named README.md first in each folder.

    What lies in a folder assets/ is of a library that a page uses.
    """
    pages = [page for page in FEATURES.rglob("*.md") if "assets" not in page.parts]
    return sorted(pages, key=lambda page: (page.parent, page.name != "README.md", page.name))


def is_of_absent_feature(file: Path) -> bool:
    """Returns whether a file belongs to a feature whose folder was deleted, or to its tests."""
    for folder in (FEATURES, FEATURE_TESTS):
        if file.is_relative_to(folder) and file.parent != folder:
            return not (FEATURES / file.relative_to(folder).parts[0]).is_dir()
    return False


def link_targets(page: Path) -> list[Path]:
    """Lists the project's files that a page links to, without folders and what is not there."""
    places = [(page.parent / target).resolve() for target, _ in LINK.findall(page.read_text())]
    return [place for place in places if place.is_file() and place.is_relative_to(PROJECT)]


def linked_files() -> list[Path]:
    """Lists the files that get a page below project/: those that a page on the site links to."""
    found: list[Path] = [README]
    unread = [*sorted(DOCS.glob("*.md")), *feature_pages(), README]
    while unread:
        for target in link_targets(unread.pop()):
            if target in found or not page_of(target).startswith("project/"):
                continue
            found.append(target)
            if target.suffix == ".md":
                unread.append(target)
    return found


def rewritten(page: Path) -> str:
    """Returns a page's text with its links turned to where their targets stand on the site."""
    return with_links_turned(page.read_text(), page)


def with_links_turned(text: str, page: Path) -> str:
    """Turns the links of a text that stands in `page`.

    A link to what is not there stays as it is: the build complains of it. Only the words are left
    of a link into a feature whose folder was deleted.
    """
    here = Path(page_of(page)).parent

    def turned(link: re.Match[str]) -> str:
        target = (page.parent / link[1]).resolve()
        if not target.is_file() or not target.is_relative_to(PROJECT):
            return link[0]
        path, _, anchor = page_of(target).partition("#")
        anchor = link[2] or (f"#{anchor}" if anchor else "")
        return f"]({os.path.relpath(path, here)}{anchor})"

    def without_absent(link: re.Match[str]) -> str:
        is_absent = is_of_absent_feature((page.parent / link[2]).resolve())
        return link[1] if is_absent else link[0]

    return LINK.sub(turned, WORDS_AND_LINK.sub(without_absent, text))


def source_page(file: Path) -> str:
    """Returns a file that is no Markdown as a page: its path, and its text in a fence."""
    language = LANGUAGES.get(file.suffix, "text")
    name = file.relative_to(PROJECT).as_posix()
    return f"# {name}\n\n````{language}\n{file.read_text().rstrip()}\n````\n"
