"""Drives a headless Chromium through chromedriver, with the standard library alone.

    with Browser() as browser:
        browser.open(Path("report.html").resolve().as_uri())
        browser.screenshot()

Invariant: the pages see a light theme and a window of the size that was asked for, and the browser
with its folder is gone when the block ends.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from contextlib import suppress
from types import TracebackType
from typing import Any

# Chromium as nobody's browser: nothing of its own goes to a network, or asks the user anything.
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
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
INSTALL = "apt-get install chromium chromium-driver"
START_SECONDS = 20.0
# A page's script, or its loading, takes no longer.
PAGE_SECONDS = 120.0


def what_is_missing() -> str:
    """Says what keeps a browser from being driven; empty where nothing does."""
    if not any(map(shutil.which, CHROMIUM)):
        return f"there is no chromium: {INSTALL}"
    if not shutil.which("chromedriver"):
        return f"there is no chromedriver: {INSTALL}"
    return ""


class Browser:
    """Opens pages and takes pictures of them.

    Args:
        width, height: of the window's content, in pixels.
    Raises:
        FileNotFoundError: chromedriver is not installed.
    """

    def __init__(self, *, width: int = 1400, height: int = 900) -> None:
        driver = shutil.which("chromedriver")
        if driver is None:
            raise FileNotFoundError(f"chromedriver is not there: {INSTALL}")
        self.folder = tempfile.mkdtemp(prefix="browser")
        self.process = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            self.address = f"http://127.0.0.1:{self._port()}"
            self.session = self._start()
            self.resize(width, height)
            light = [{"name": "prefers-color-scheme", "value": "light"}]
            self.devtools("Emulation.setEmulatedMedia", features=light)
        except BaseException:
            self._end_process()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            # Whatever ended it before, a browser that is gone is closed.
            with suppress(OSError):
                self._call("DELETE", self.session)
        finally:
            self._end_process()

    @property
    def is_gone(self) -> bool:
        """Returns whether the browser's program has ended."""
        return self.process.poll() is not None

    def resize(self, width: int, height: int) -> None:
        """Gives the window's content another size, in pixels."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", **screen)

    def open(self, url: str) -> None:
        """Opens a page, anew also where only what follows the # differs."""
        self._call("POST", f"{self.session}/url", {"url": "about:blank"})
        self._call("POST", f"{self.session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Runs JavaScript in the page, the body of a function, and gives what it returns."""
        body = {"script": script, "args": arguments}
        return self._call("POST", f"{self.session}/execute/sync", body)

    def run_async(self, script: str, *arguments: Any) -> Any:
        """Runs JavaScript that calls the function it gets as its last argument with its result."""
        body = {"script": script, "args": arguments}
        return self._call("POST", f"{self.session}/execute/async", body)

    def wait(self, condition: str, *arguments: Any, seconds: float = 20.0) -> None:
        """Waits until a JavaScript expression is true; raises TimeoutError where it stays false."""
        end = time.monotonic() + seconds
        while not self.run(f"return Boolean({condition})", *arguments):
            if time.monotonic() > end:
                raise TimeoutError(f"after {seconds:g} s the page's {condition} is still false")
            time.sleep(0.02)

    def texts(self, selector: str) -> list[str]:
        """Returns the texts of all elements that a selector finds."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        found: list[str] = self.run(script, selector)
        return found

    def click(self, selector: str) -> None:
        """Clicks the first element that a selector finds."""
        self.run("document.querySelector(arguments[0]).click()", selector)

    def press(self, keys: str) -> None:
        """Presses keys, on what has the focus."""
        strokes = [
            {"type": stroke, "value": key} for key in keys for stroke in ("keyDown", "keyUp")
        ]
        self._act({"type": "key", "id": "keys", "actions": strokes})

    def point(self, x: float, y: float, *, click: bool = False) -> None:
        """Moves the mouse to a place of the window, in pixels, and may click there."""
        actions: list[dict[str, Any]] = [
            {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}
        ]
        if click:
            actions += [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self._act({"type": "pointer", "id": "mouse", "actions": actions})

    def drag(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Presses the mouse at a place of the window, in pixels, and lets it go at another."""
        actions: list[dict[str, Any]] = [
            {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)},
            {"type": "pointerDown", "button": 0},
            {"type": "pointerMove", "duration": 60, "x": round(to_x), "y": round(to_y)},
            {"type": "pointerUp", "button": 0},
        ]
        self._act({"type": "pointer", "id": "mouse", "actions": actions})

    def _act(self, source: dict[str, Any]) -> None:
        self._call("POST", f"{self.session}/actions", {"actions": [source]})

    def screenshot(self) -> bytes:
        """Returns a picture of what the window shows, as PNG."""
        return base64.b64decode(self._call("GET", f"{self.session}/screenshot"))

    def errors(self) -> list[str]:
        """Returns what the pages' scripts raised or could not load since the last call."""
        return [entry["message"] for entry in self._log("browser") if entry["level"] == "SEVERE"]

    def console(self) -> list[str]:
        """Returns all that the pages' console says since the last call of it or of `errors`."""
        return [entry["message"] for entry in self._log("browser")]

    def requests(self) -> list[str]:
        """Returns the addresses that the pages have asked for since the last call."""
        found = []
        for entry in self._log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found

    def _log(self, name: str) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self._call("POST", f"{self.session}/se/log", {"type": name})
        return entries

    def heap(self) -> float:
        """Returns the bytes of JavaScript's heap and arrays, after a collection of garbage."""
        self.devtools("HeapProfiler.collectGarbage")
        usage = self.devtools("Runtime.getHeapUsage")
        # Arrays of numbers lie beside the heap.
        return float(usage["usedSize"] + usage.get("backingStorageSize", 0))

    def devtools(self, command: str, **parameters: Any) -> Any:
        """Sends a command of Chromium's devtools protocol."""
        body = {"cmd": command, "params": parameters}
        return self._call("POST", f"{self.session}/goog/cdp/execute", body)

    def _port(self) -> int:
        """Reads the port from the driver's first lines."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "started successfully on port" in line:
                return int(line.rstrip(".\n").rsplit(" ", 1)[1])
        raise RuntimeError("chromedriver ended before it was ready")

    def _start(self) -> str:
        """Starts Chromium; returns the beginning of the session's addresses."""
        options = {"args": [*ARGUMENTS, f"--user-data-dir={self.folder}"]}
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            "timeouts": {"script": int(1000 * PAGE_SECONDS)},
        }
        started = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        return f"/session/{started['sessionId']}"

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Calls chromedriver; returns the value of its answer."""
        request = urllib.request.Request(
            self.address + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PAGE_SECONDS) as answer:
            return json.load(answer)["value"]

    def _end_process(self) -> None:
        """Ends chromedriver, which ends its Chromium, and removes the profile's folder."""
        self.process.terminate()
        try:
            self.process.wait(timeout=START_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
