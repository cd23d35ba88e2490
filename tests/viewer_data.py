"""Reads the data files of a viewer as its pages do, for tests."""

from __future__ import annotations

import base64
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from features.viewer.command import main
from features.viewer.data_files import unpack as unpack_bytes
from features.viewer.list_columns import TEXTS

CALL = re.compile(r'viewerData\("([\w/]+)","([\w+/=]+)"\);\n')


def unpack(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the header and the arrays of a data file."""
    match = CALL.fullmatch(path.read_text())
    assert match and str(path.with_suffix("")).endswith(match[1])
    return unpack_bytes(zlib.decompress(base64.b64decode(match[2])))


def make_viewer(*runs: Path) -> Path:
    """Makes the viewer of runs; returns its folder."""
    assert main([str(run) for run in runs]) == 0
    return runs[0] / "viewer"


def manifest(viewer: Path) -> dict[str, Any]:
    """Returns the viewer's manifest."""
    return unpack(viewer / "manifest.js")[0]


def listed(viewer: Path) -> list[dict[str, Any]]:
    """Returns the rows of the list, texts and all."""
    rows = []
    for part in manifest(viewer)["parts"]:
        header, arrays = unpack(viewer / f"data/list/{part['number']}.js")
        for i, episode_id in enumerate(header["ids"]):
            row = {"id": episode_id, **{name: array[i] for name, array in arrays.items()}}
            for name in TEXTS:
                row[name] = header[name][row[name]]
            rows.append(row)
    return rows


def page_of(viewer: Path, row: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns what the page of a listed episode shows, and the columns of each of its rows."""
    number = row["page"]
    header, arrays = unpack(viewer / f"data/pages/{number // 1000}/{number}.js")
    place = row["in_page"]
    episode = header["episodes"][place]
    columns = [
        {
            name: arrays[f"{place}.{k}.{name}"]
            for name in [*described["columns"], "prompt_ids", "response_ids"]
        }
        for k, described in enumerate(episode["rows"])
    ]
    vocabulary = dict(zip(header["ids"], header["texts"], strict=True))
    return {**episode, "vocabulary": vocabulary}, columns


def pages(viewer: Path) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Returns by id the pages of all episodes."""
    return {row["id"]: page_of(viewer, row) for row in listed(viewer)}
