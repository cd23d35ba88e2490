"""Drives a headless Chromium over the viewer's pages, for its tests and its benchmark."""

from __future__ import annotations

import shutil
import time
from types import TracebackType
from typing import Any, Self

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
# A page has nobody to talk to: whatever a browser asks for on its own is turned off.
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
PATIENCE_S = 20.0


def what_is_missing() -> str:
    """Says what keeps a browser from being driven; empty where nothing does."""
    if not any(map(shutil.which, CHROMIUM)):
        return "there is no chromium: apt-get install chromium chromium-driver"
    if not shutil.which("chromedriver"):
        return "there is no chromedriver: apt-get install chromium-driver"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "there is no selenium: pip install -r requirements-dev.txt"
    return ""


class Browser:
    """Opens pages of a viewer, and waits until they are drawn; to be used in a `with`."""

    def __init__(self, width: int = 1400, height: int = 900, *, dark: bool = False) -> None:
        self._size = (width, height)
        self._dark = dark

    def __enter__(self) -> Self:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = next(filter(None, map(shutil.which, CHROMIUM)))
        for argument in ARGUMENTS:
            options.add_argument(argument)
        options.add_argument(f"--window-size={self._size[0]},{self._size[1]}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service = Service(shutil.which("chromedriver"))
        self.driver = webdriver.Chrome(options=options, service=service)
        sizes = {"width": self._size[0], "height": self._size[1]}
        self._command(
            "Emulation.setDeviceMetricsOverride", {**sizes, "deviceScaleFactor": 1, "mobile": False}
        )
        if self._dark:
            dark = {"name": "prefers-color-scheme", "value": "dark"}
            self._command("Emulation.setEmulatedMedia", {"features": [dark]})
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.driver.quit()

    def _command(self, name: str, arguments: dict[str, Any]) -> Any:
        return self.driver.execute_cdp_cmd(name, arguments)

    def open(self, address: str) -> None:
        """Opens a page anew, and waits for its view."""
        self.driver.get("about:blank")
        self.driver.get(address)
        self.wait_for("return Boolean(document.documentElement.dataset.shown)")

    def show(self, place: str) -> None:
        """Goes to another view of the open page: what stands behind its #."""
        self.run("document.documentElement.dataset.shown = ''; location.hash = arguments[0]", place)
        self.wait_for("return Boolean(document.documentElement.dataset.shown)")

    def run(self, script: str, *arguments: Any) -> Any:
        """Runs a script in the page, and returns what it does."""
        return self.driver.execute_script(script, *arguments)

    def wait_for(self, script: str, *arguments: Any) -> Any:
        """Waits until a script returns something true; raises TimeoutError if it never does."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            found = self.run(script, *arguments)
            if found:
                return found
            time.sleep(0.02)
        raise TimeoutError(f"it never came to: {script}")

    def texts(self, selector: str) -> list[str]:
        """Returns the texts of all elements that a selector finds."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return self.run(script, selector)

    def click(self, selector: str) -> None:
        """Clicks the first element that a selector finds."""
        self.run("document.querySelector(arguments[0]).click()", selector)

    def press(self, keys: str) -> None:
        """Presses keys, on what has the focus."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(keys).perform()

    def heap(self) -> float:
        """Returns the bytes of JavaScript's heap and arrays, after a collection of garbage."""
        self._command("HeapProfiler.collectGarbage", {})
        usage = self._command("Runtime.getHeapUsage", {})
        # Arrays of numbers lie beside the heap.
        return usage["usedSize"] + usage.get("backingStorageSize", 0)

    def complaints(self) -> list[str]:
        """Returns what the browser's console says since it was asked the last time."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Returns the addresses that the page has asked for since it was asked the last time."""
        import json

        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found

    def picture(self, path: str) -> None:
        """Writes what is seen as a PNG."""
        self.driver.save_screenshot(path)
