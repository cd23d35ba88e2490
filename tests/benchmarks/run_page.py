"""What the page of a long run costs: seconds to read, to write and to open, and its size.

    python -m tests.benchmarks.run_page [--steps 5000] [--metrics 300]

The run is made up. With chromium and chromedriver the page is opened, too.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from features.run_page.content import make_content
from features.run_page.html import write_html
from features.run_page.run_folder import RunFolder
from scripts.browser import Browser, what_is_missing

KNOWN = ("critic/score/mean", "actor/entropy", "actor/grad_norm", "timing_s/step", "timing_s/gen")
# Pages that are written; the shortest counts.
REPEATS = 3


def write_run(folder: Path, steps: int, metrics: int) -> None:
    """Writes a metrics.jsonl of noise."""
    generator = random.Random(0)
    names = [*KNOWN, *(f"own/metric_{number}" for number in range(metrics - len(KNOWN)))]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            values = {name: generator.gauss(1, 0.2) for name in names}
            file.write(json.dumps({"step": step, **values}) + "\n")


def seconds_to_open(page: Path) -> float | None:
    """Measures how long the page takes until its charts are drawn; None without a browser."""
    if what_is_missing():
        return None
    with Browser() as browser:
        began = time.perf_counter()
        browser.open(page.as_uri())
        browser.wait("document.querySelector('.uplot canvas')")
        return time.perf_counter() - began


def main() -> None:
    """Measures, and prints the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--metrics", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder, options.steps, options.metrics)
        began = time.perf_counter()
        run = RunFolder.read(folder)
        print(f"read: {time.perf_counter() - began:.2f} s")
        page = folder / "report.html"
        costs = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            write_html(make_content([run], page), page)
            costs.append(time.perf_counter() - began)
        print(f"write: {min(costs):.3f} s, {page.stat().st_size / 1e6:.2f} MB")
        opened = seconds_to_open(page)
        print("open: no browser here" if opened is None else f"open: {opened:.2f} s")


if __name__ == "__main__":
    main()
