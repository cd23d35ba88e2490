"""Opens the pages of a viewer in a browser, and waits until they are drawn."""

from __future__ import annotations

import json
from typing import Any

from scripts.browser import Browser

# All texts that a search looks into are in memory.
ALL_KEPT = "[...Array(viewer.countTexts()).keys()].every((k) => viewer.keptTexts(k))"
SHOWN = "document.documentElement.dataset.shown"


def open_viewer(browser: Browser, address: str) -> None:
    """Opens a page anew, and waits for its view."""
    browser.open(address)
    browser.wait(SHOWN)


def show(browser: Browser, place: str) -> None:
    """Goes to another view of the open page: what stands behind its #."""
    browser.run(f"{SHOWN} = ''; location.hash = arguments[0]", place)
    browser.wait(SHOWN)


def searched(browser: Browser, text: str) -> list[Any]:
    """Searches as the list does at first: is it exact, and ids of what may hold the text."""
    return browser.run_async(
        "const [text, done] = arguments; viewer.search(JSON.parse(text)).then((found) => done("
        "[found.isExact, viewer.table.ids.filter((_, i) => found.candidates[i])]))",
        # Halves of characters do not go through a driver as they are.
        json.dumps(text),
    )
