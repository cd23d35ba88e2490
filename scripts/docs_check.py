"""Looks through the built site of the docs for what its build lets pass: `docs_check.py SITE`.

A page must load nothing from another server, each link inside the site must have a target, and no
table, list or fence of Markdown may have stayed text. Where Chromium is installed no page may be
wider than a phone. Each fault is a line, and the exit code is 1 where there is one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from scripts.browser import Browser, what_is_missing  # noqa: E402

# Pixels.
PHONE = 390
# By which attribute a tag loads something when its page is opened. Links that are followed, <a>,
# may lead anywhere.
LOADING = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
    "object": "data",
    "link": "href",
}
# A <link> with another rel names a page and loads nothing.
LOADING_RELATIONS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "modulepreload"}
CSS_LOADS = re.compile(r"(?:url\(\s*[\"']?|@import\s+[\"'])((?:https?:)?//[^\s\"')]+)")
# Markdown that a forge reads and the site's reader did not.
LEFT_AS_TEXT = re.compile(r"(?m)^(\s*\|.*\||\s*[-*] \S.*|\s*\d+\. \S.*|\s*```.*)$")


class Page(HTMLParser):
    """Holds what one page loads, where its links lead, its anchors, and its paragraphs' text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.paragraphs: list[str] = []
        self._paragraph: str | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes what a tag loads, links to and is called."""
        given = {name: value or "" for name, value in attrs}
        relations = set(given.get("rel", "").split())
        if tag in LOADING and (tag != "link" or relations & LOADING_RELATIONS):
            self.loads.append(given.get(LOADING[tag], ""))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "p":
            self._paragraph = ""
        elif tag == "code" and self._paragraph is not None:
            # Text inside code is no Markdown.
            self._paragraph += "`"

    def handle_data(self, data: str) -> None:
        """Notes a paragraph's text."""
        if self._paragraph is not None:
            self._paragraph += data

    def handle_endtag(self, tag: str) -> None:
        """Ends a paragraph."""
        if tag == "p" and self._paragraph is not None:
            self.paragraphs.append(self._paragraph)
            self._paragraph = None


def faults(site: Path) -> Iterator[str]:
    """Yields a sentence for each fault of the site's pages and style sheets."""
    pages = {path.resolve(): Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site} holds no page"
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        for address in page.loads:
            if urlsplit(address).netloc:
                yield f"{name} loads {address} from another server"
        # That page is served from any folder, so its links begin at the site's root.
        if name.name != "404.html":
            yield from _broken_links(path, name, page, pages)
        for paragraph in page.paragraphs:
            if left := LEFT_AS_TEXT.search(paragraph):
                yield f"{name} shows as text what was to be a table, list or fence: {left[0]!r}"
    for sheet in sorted(site.rglob("*.css")):
        for address in CSS_LOADS.findall(sheet.read_text()):
            yield f"{sheet.relative_to(site)} loads {address} from another server"


def _broken_links(path: Path, name: Path, page: Page, pages: dict[Path, Page]) -> Iterator[str]:
    """Yields a sentence for each link of a page whose file or anchor is not there."""
    for link in page.links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if target.is_dir():
            target = target / "index.html"
        if not target.exists():
            yield f"{name} links to {link}, which is not there"
        elif parts.fragment and target in pages:
            yield from _broken_anchor(link, name, parts.fragment, pages[target])


def _broken_anchor(link: str, name: Path, anchor: str, target: Page) -> Iterator[str]:
    """Yields a sentence where the page that a link leads to has no such anchor."""
    if unquote(anchor) not in target.anchors:
        yield f"{name} links to {link}, whose anchor is not there"


def wide_pages(site: Path) -> Iterator[str]:
    """Yields a sentence for each page that a phone has to scroll sideways; files' listings may be.

    Without Chromium nothing is looked at.
    """
    if what_is_missing():
        return
    pages = sorted(page for page in site.rglob("*.html") if "project" not in page.parts)
    with Browser(width=PHONE, height=844) as browser:
        for page in pages:
            # A page that has moved leads on at once.
            if "http-equiv" in page.read_text():
                continue
            browser.open(page.resolve().as_uri())
            width = browser.run("return document.documentElement.scrollWidth")
            if width > PHONE:
                name = page.relative_to(site)
                yield f"{name} is {width} pixels wide on a phone of {PHONE}"


def main(site: Path) -> None:
    """Prints every fault and ends with exit code 1 if there is one."""
    found = [*faults(site), *wide_pages(site)]
    for fault in found:
        print(fault, file=sys.stderr)
    if found:
        sys.exit(1)
    print(f"the docs are in {site / 'index.html'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
