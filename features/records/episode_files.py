"""The files of recorded episodes: a line of JSON each.

A process that dies while it writes leaves all lines but the last whole. Invariant: an
episode that is read has every entry of NEEDED, and each of its rows has one number of tokens in
every entry of PER_TOKEN.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data.json_lines import join_objects, json_object
from data.packed_arrays import unpack_array
from data.protocol import DataProto
from features.records.episode_entries import RECORD, take_played_episodes
from training.config.plain_files import plain_lines
from training.run.dumps import dump as dump

# An episode as the file has it: turns and rows are lists of dicts.
Recorded = dict[str, Any]
# Which prompt group, episode and environment it is.
NAMES = ("uid", "episode_id", "data_source")
NEEDED = (*NAMES, "agent_index", "env_seed", "ending", "initial_messages", "turns", "rows")
PER_TOKEN = ("response_ids", "response_mask", "turn_ids", "log_probs", "rewards")
OPTIONAL_ARRAYS = ("template_mask", "weight_versions")
# The dtypes of a row's arrays, also of those that a file has as plain lists.
ARRAYS = {
    "prompt_ids": "<i4",
    "response_ids": "<i4",
    "response_mask": "|i1",
    "turn_ids": "<i2",
    "log_probs": "<f4",
    "rewards": "<f4",
    "template_mask": "|i1",
    "weight_versions": "<i4",
}


def episodes_file(folder: Path, step: int, *, validate: bool = False) -> Path:
    """Returns the file of a step's episodes, of training or of validation."""
    return folder / f"{'val-' if validate else ''}{step}.jsonl"


def arrays_file(folder: Path, step: int) -> Path:
    """Returns the file of the arrays that a step's update was given."""
    return folder / f"{step}.npz"


def episode_lines(entries: Iterable[Mapping[str, Any]]) -> bytes:
    """Writes episodes as lines of strict JSON.

    What of an episode is JSON already, under RECORD, is written as it is.
    """
    return b"".join([_episode_line(entry) for entry in entries])


def _episode_line(entry: Mapping[str, Any]) -> bytes:
    if RECORD not in entry:
        return json_object(entry) + b"\n"
    names = {name: value for name, value in entry.items() if name != RECORD}
    return join_objects(json_object(names), entry[RECORD]) + b"\n"


def write_episodes(folder: Path, batch: DataProto) -> Path:
    """Writes the episodes of a batch that was played to the folder, at once; returns the file."""
    info = batch.meta_info
    path = episodes_file(folder, info["global_steps"], validate=info["validate"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(episode_lines(take_played_episodes(batch)))
    return path


def read_episodes(path: Path, first: int | None = None) -> list[Recorded]:
    """Reads the episodes of a file, each with `where` it stands there.

    Arrays of rows are numpy arrays. A last line that is cut short is left out, with a printed line.

    Args:
        path: the file, an episode a line.
        first: read only so many; None = all.
    Raises:
        ValueError: another line is no JSON object, or an episode lacks something.
    """
    episodes: list[Recorded] = []
    for number, line in enumerate(plain_lines(path), start=1):
        if first is not None and len(episodes) >= first:
            break
        where = f"{path.name} line {number}"
        try:
            episode = {**json.loads(line), "where": where}
        except (ValueError, TypeError, RecursionError) as error:
            if line.endswith(b"\n"):
                raise ValueError(f"{where} is no episode: {error}") from error
            print(f"{where} is cut short, left out: the process ended while it wrote")
            break
        episodes.append(unpacked(episode))
    return episodes


def unpacked(episode: Recorded) -> Recorded:
    """Returns an episode that was read with its rows' arrays as numpy arrays.

    Raises:
        ValueError: it lacks something.
    """
    where = episode["where"]
    missing = [name for name in NEEDED if name not in episode]
    if missing:
        raise ValueError(
            f"{where}: lacks {', '.join(missing)}; a file of a run's episodes has them"
        )
    rows = []
    for number, packed in enumerate(episode["rows"]):
        try:
            row = {**packed, **_unpacked_arrays(packed)}
        except (KeyError, ValueError) as error:
            raise ValueError(f"{where}: row {number}: {error}") from error
        lengths = {name: len(row[name]) for name in PER_TOKEN}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{length} {name}" for name, length in lengths.items())
            raise ValueError(f"{where}: row {number} has {counts}")
        rows.append(row)
    return {**episode, "rows": rows}


def _unpacked_arrays(row: Recorded) -> dict[str, np.ndarray]:
    """Unpacks the arrays that a row has."""
    arrays = {name: unpack_array(row[name], ARRAYS[name]) for name in ("prompt_ids", *PER_TOKEN)}
    for name in OPTIONAL_ARRAYS:
        if row.get(name) is not None:
            arrays[name] = unpack_array(row[name], ARRAYS[name])
    return arrays
