"""How long the episode viewer takes to be made and to open, its memory, and a search.

10,000 episodes of 2,000 tokens, over 40 steps, as a run would have recorded them; in a headless
Chromium, from the disk. The limits: open within 2 s, less than 200 MB of JavaScript's heap, the
first rows of a search within 1 s, and its exact count within 1 s once all texts are in memory.
A search is cold when the page was opened for it, and warm when all texts are in memory.

Run with nothing else on the machine:
python -m tests.benchmarks.viewer_size [--episodes N] [--tokens N]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.browser import Browser
from tests.made_episodes import Made, make_run, words
from tests.viewer_pages import ALL_KEPT, open_viewer, show

GROUPS, MEMBERS = 32, 8
MIB = 1 << 20


def make_records(folder: Path, episodes: int, tokens: int) -> None:
    """Writes the records, a step of 256 episodes after another."""
    steps = max(1, round(episodes / (GROUPS * MEMBERS)))
    made = Made(steps=steps, groups=GROUPS, members=MEMBERS, tokens=tokens, turns=6, words=8000)
    make_run(folder, made)


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def build(folder: Path) -> tuple[float, float]:
    """Makes the viewer in a process of its own; returns its seconds and its peak memory, MiB."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "features.viewer.command", str(folder)], check=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return time.perf_counter() - began, peak


def search(browser: Browser, text: str) -> dict[str, Any]:
    """Types a text; returns the seconds until all rows in sight hold it, and until all rows do."""
    script = """
      const [text, done] = arguments;
      const began = performance.now();
      const input = document.getElementById("search");
      location.hash = viewer.listAddress({ text });
      let first = null;
      const wait = () => {
        const { found } = viewer.listed;
        const status = document.querySelector(".status")?.textContent || "";
        const isThere = found && found.text === text && document.documentElement.dataset.shown;
        if (isThere && viewer.listed.isSettled) {
          if (first === null) first = performance.now() - began;
          if (!status.startsWith("at most")) {
            const rows = viewer.listed.rows.length;
            done({ first: first / 1000, all: (performance.now() - began) / 1000, rows });
            return;
          }
        }
        setTimeout(wait, 5);
      };
      setTimeout(wait, 5);
    """
    return browser.run_async(script, text)


def tell_search(browser: Browser, name: str, text: str) -> None:
    """Prints how long a search takes."""
    found = search(browser, text)
    print(
        f"{name} ({text!r}): {found['rows']} episodes, first rows {found['first']:.2f} s, "
        f"exact count {found['all']:.2f} s"
    )


def open_page(browser: Browser, page: str) -> float:
    """Opens the viewer; returns the seconds until its first rows are drawn."""
    began = time.perf_counter()
    open_viewer(browser, page)
    browser.wait("document.querySelectorAll('.list-row').length > 0")
    return time.perf_counter() - began


def measure(folder: Path) -> None:
    """Prints what opening, searching and looking at episodes cost."""
    page = (folder / "viewer" / "index.html").as_uri()
    vocabulary = words(8000)
    with Browser() as browser:
        print(f"open: {open_page(browser, page):.2f} s (again {open_page(browser, page):.2f} s)")
        print(f"heap after opening: {browser.heap() / MIB:.0f} MB")
        rare, common = f"{vocabulary[5000]} {vocabulary[1]}", f"{vocabulary[2]} {vocabulary[1]}"
        asked = {"rare": rare, "common": common, "one letter": "z", "not there": "nowhere at all"}
        for name, text in asked.items():
            open_page(browser, page)
            tell_search(browser, f"cold search, {name}", text)
        began = time.perf_counter()
        open_page(browser, page)
        browser.wait(ALL_KEPT)
        print(
            f"all texts in memory {time.perf_counter() - began:.2f} s after the page was asked for"
        )
        for name, text in asked.items():
            tell_search(browser, f"warm search, {name}", text)
        print(f"heap after searches: {browser.heap() / MIB:.0f} MB")
        for step in range(1, 13):
            began = time.perf_counter()
            show(browser, f"#episode/0/train/{step}/episode-{step}-{step}-1?color=entropy")
            seconds = time.perf_counter() - began
        print(f"an episode: {seconds:.2f} s; heap after twelve: {browser.heap() / MIB:.0f} MB")
        began = time.perf_counter()
        show(browser, "#group/0/train/3/group-3-3")
        print(f"a group of {MEMBERS}: {time.perf_counter() - began:.2f} s")
        print(f"heap in the end: {browser.heap() / MIB:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=2000, help="of an episode's response")
    parser.add_argument("--keep", type=Path, help="a folder for the records, which is kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary) / "run"
        if not (folder / "episodes").exists():
            make_records(folder, args.episodes, args.tokens)
        print(f"records: {size(folder / 'episodes') / MIB:.0f} MiB")
        seconds, peak = build(folder)
        print(f"made in {seconds:.0f} s, peak {peak:.0f} MiB")
        print(f"viewer: {size(folder / 'viewer') / MIB:.0f} MiB on disk")
        measure(folder)


if __name__ == "__main__":
    main()
