"""Makes folders as runs leave them, and reads what a page of theirs holds."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from features.run_page.content import make_content
from features.run_page.html import make_html
from features.run_page.run_folder import RunFolder
from training.config.loader import load_config
from training.config.reference import to_yaml


def make_run(
    folder: Path,
    records: Iterable[dict[str, Any]] = (),
    events: Iterable[dict[str, Any]] = (),
    settings: Iterable[str] | None = None,
) -> Path:
    """Makes a run's folder; `settings` as on a command line, None: nothing is recorded."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) + "\n" for record in records]
    (folder / "metrics.jsonl").write_text("".join(lines))
    if events:
        (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    if settings is not None:
        (folder / "config.yaml").write_text(config_text(*settings))
    return folder


def config_text(*settings: str) -> str:
    """Writes the whole configuration of these settings, as a run records it."""
    argv = ["configs/quickstart.yaml", *settings]
    return to_yaml(load_config(argv, check=False).config)


def event(kind: str, step: int, **parts: Any) -> dict[str, Any]:
    """Makes an event that is whole."""
    whole = {"time": 1000.0 + step, "step": step, "kind": kind, "name": "", "text": ""}
    return whole | {"view": None} | parts


def steps(count: int, **metrics: float) -> list[dict[str, Any]]:
    """Makes the records of steps 1 to `count`, the reward a tenth of the step."""
    return [{"step": n, "critic/score/mean": n / 10, **metrics} for n in range(1, count + 1)]


def content_of(*folders: Path, page: Path | None = None) -> dict[str, Any]:
    """Returns what a page of these runs holds, read back from its text."""
    runs = [RunFolder.read(folder) for folder in folders]
    text = make_html(make_content(runs, page or folders[0] / "report.html"))
    return content_in(text)


def content_in(text: str) -> dict[str, Any]:
    """Reads the content of a page's text."""
    found = re.findall(r'<script type="application/json" id="content">(.*?)</script>', text, re.S)
    assert len(found) == 1
    content: dict[str, Any] = json.loads(found[0])
    return content


def numbers(text: str, dtype: str = "<f4") -> list[float]:
    """Reads numbers that a page holds in base64."""
    return np.frombuffer(base64.b64decode(text), dtype=dtype).tolist()


def curve_in(content: dict[str, Any], metric: str, group: int = 0) -> dict[str, list[float]]:
    """Returns a metric's steps and numbers on a page."""
    written = content["groups"][group]["curves"][metric]
    table = content["groups"][group]["tables"][written["table"]]
    curve = {"first": numbers(table["first"], "<i4")}
    for name in ("mean", "low", "high"):
        if name in written:
            curve[name] = numbers(written[name])
    if "runs" in written:
        curve["runs"] = numbers(written["runs"], "<i4")
    return curve


def rewrite_settings(path: Path, **changed: Any) -> None:
    """Changes top-level settings of a recorded configuration."""
    settings = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(settings | changed))
