"""Opens the pages of a viewer in a browser, and waits until they are drawn."""

from __future__ import annotations

from scripts.browser import Browser

SHOWN = "document.documentElement.dataset.shown"


def open_viewer(browser: Browser, address: str) -> None:
    """Opens a page anew, and waits for its view."""
    browser.open(address)
    browser.wait(SHOWN)


def show(browser: Browser, place: str) -> None:
    """Goes to another view of the open page: what stands behind its #."""
    browser.run(f"{SHOWN} = ''; location.hash = arguments[0]", place)
    browser.wait(SHOWN)
