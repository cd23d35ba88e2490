"""Reads recorded episodes one line at a time, whatever state the files are in.

Owns what an episode is to the viewer. Invariant: an episode that is returned has entries of the
types below and rows whose arrays are of one length; whatever is wrong with a line is a ValueError
that says so, and costs that line alone.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data.packed_arrays import unpack_array
from training.config.plain_files import plain_lines

Kind = Literal["train", "val"]
# Reads kind and step from a file's name.
EPISODE_FILE = re.compile(r"(?P<val>val-)?(?P<step>\d{1,9})\.jsonl")
# The arrays of a row that have one entry a token of the response.
PER_TOKEN = {
    "response_ids": "<i4",
    "response_mask": "|i1",
    "turn_ids": "<i2",
    "log_probs": "<f4",
    "rewards": "<f4",
}
OPTIONAL_PER_TOKEN = {"template_mask": "|i1", "weight_versions": "<i4"}


@dataclass(frozen=True)
class RecordFile:
    """Names a file of episodes: a step's of training, or of a validation."""

    kind: Kind
    step: int
    path: Path

    @property
    def update_path(self) -> Path:
        """Returns where the columns of the step's update are, if there was one."""
        return self.path.with_name(f"{self.step}.npz")


@dataclass(frozen=True)
class RecordedRow:
    """Holds a row as it was generated.

    Attributes:
        prompt_ids: (prompt length,) int32.
        tokens: by name an array (response length,); those of PER_TOKEN are always there.
        parent: {"row": k, "tokens": n} where it begins with n ids of row k.
        seam: of a row with which a new context begins: its reason, how many messages were dropped,
            the tokens of the row before it, and a sentence on a fault.
        aside: of a row that the environment asked for, who earns by itself there; "": nobody.
    """

    prompt_ids: np.ndarray
    tokens: dict[str, np.ndarray]
    parent: dict[str, int] | None
    seam: dict[str, Any] | None = None
    aside: str | None = None

    def __len__(self) -> int:
        """Counts the tokens of the response."""
        return len(self.tokens["response_ids"])


@dataclass(frozen=True)
class RecordedEpisode:
    """Holds an episode's line; `entries` are those that are shown as they are."""

    uid: str
    episode_id: str
    entries: dict[str, Any]
    initial_messages: list[dict[str, Any]]
    turns: list[dict[str, Any]]
    rows: list[RecordedRow]
    failed_attempts: list[dict[str, Any]] = field(default_factory=list)

    def number(self, name: str, default: float = float("nan")) -> float:
        """Returns an entry that is a number; `default` where it is none."""
        value = self.entries.get(name)
        if not isinstance(value, int | float):
            return default
        try:
            return float(value)
        except OverflowError:
            return default

    def text(self, name: str) -> str:
        """Returns an entry as text; nothing where it is null or missing."""
        value = self.entries.get(name)
        return "" if value is None else as_text(value)


def list_files(folder: Path) -> list[RecordFile]:
    """Lists a folder's files of episodes, training first, by step."""
    files = []
    for path in folder.iterdir():
        match = EPISODE_FILE.fullmatch(path.name)
        if match and path.is_file():
            kind: Kind = "val" if match["val"] else "train"
            files.append(RecordFile(kind=kind, step=int(match["step"]), path=path))
    return sorted(files, key=lambda file: (file.kind, file.step))


@dataclass(frozen=True)
class RecordLine:
    """Says where a line of a file stands, so that it can be read once more.

    Attributes:
        number: from 1 on.
        start, length: bytes.
    """

    number: int
    start: int
    length: int


def read_lines(path: Path) -> Iterator[tuple[RecordLine, bytes]]:
    """Yields the lines of a file, and where they stand."""
    start = 0
    for number, text in enumerate(plain_lines(path), start=1):
        yield RecordLine(number=number, start=start, length=len(text)), text
        start += len(text)


def parse_episode(text: bytes) -> RecordedEpisode:
    """Makes an episode of a line.

    Raises:
        ValueError: it is none; the text says why.
    """
    if not text.endswith(b"\n") and not text.rstrip().endswith(b"}"):
        raise ValueError("is cut short: the process ended while it wrote")
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from error
    if not isinstance(entries, dict):
        raise ValueError("is no JSON object")
    missing = [name for name in ("episode_id", "turns", "rows") if name not in entries]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}")
    rows = [_row(row, number) for number, row in enumerate(_dicts(entries.pop("rows"), "rows"))]
    return RecordedEpisode(
        uid=as_text(entries.get("uid", "")),
        episode_id=as_text(entries["episode_id"]),
        initial_messages=_dicts(entries.pop("initial_messages", []), "initial_messages"),
        turns=_dicts(entries.pop("turns"), "turns"),
        failed_attempts=_dicts(entries.pop("failed_attempts", None) or [], "failed_attempts"),
        rows=rows,
        entries=entries,
    )


def _dicts(value: Any, name: str) -> list[dict[str, Any]]:
    """Returns a list of JSON objects; ValueError for anything else."""
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ValueError(f"{name} is no list of objects")
    return value


def _row(record: dict[str, Any], number: int) -> RecordedRow:
    """Makes a row of its record; ValueError where its arrays do not fit together."""
    tokens = {}
    for name, dtype in PER_TOKEN.items():
        if name not in record:
            raise ValueError(f"row {number} lacks {name}")
        tokens[name] = as_array(record[name], dtype, f"{name} of row {number}")
    for name, dtype in OPTIONAL_PER_TOKEN.items():
        if record.get(name) is not None:
            tokens[name] = as_array(record[name], dtype, f"{name} of row {number}")
    if len({len(array) for array in tokens.values()}) > 1:
        counts = ", ".join(f"{len(array)} {name}" for name, array in tokens.items())
        raise ValueError(f"row {number} has {counts}")
    prompt_ids = as_array(record.get("prompt_ids", []), "<i4", f"prompt_ids of row {number}")
    parent = record.get("parent")
    if not isinstance(parent, dict) or not {"row", "tokens"} <= parent.keys():
        parent = None
    seam = record.get("seam")
    if not isinstance(seam, dict) or not {"reason", "dropped", "tokens"} <= seam.keys():
        seam = None
    aside = record.get("speaker") if record.get("aside") is True else None
    return RecordedRow(
        prompt_ids=prompt_ids,
        tokens=tokens,
        parent=parent,
        seam=seam,
        aside=aside if isinstance(aside, str) else None,
    )


def as_array(value: Any, dtype: str, what: str) -> np.ndarray:
    """Makes a 1-D array of a list of numbers, null being NaN, or of a packed one.

    Raises:
        ValueError: it is neither.
    """
    try:
        array = unpack_array(value, dtype)
    except (TypeError, OverflowError, ValueError) as error:
        raise ValueError(f"{what} cannot be read: {error}") from error
    if array.ndim != 1:
        raise ValueError(f"{what} is no flat list")
    return array.astype(dtype, copy=False)


def as_text(value: Any) -> str:
    """Returns a value as text: a string as it is, all else as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def message_text(message: dict[str, Any]) -> str:
    """Returns the text of a message: of a list of parts their texts, other parts by their type."""
    content = message.get("content")
    if content is None:
        content = ""
    if isinstance(content, list):
        return "".join(_part_text(part) for part in content)
    return as_text(content)


def _part_text(part: Any) -> str:
    if isinstance(part, dict):
        if isinstance(part.get("text"), str):
            return part["text"]
        return f"[{as_text(part.get('type', 'part'))}]"
    return as_text(part)


def all_texts(episode: RecordedEpisode) -> list[str]:
    """Lists all that was said in an episode, for the search: a text a message, error or tool."""
    texts = [message_text(message) for message in episode.initial_messages]
    for turn in [*(t for a in episode.failed_attempts for t in _turns(a)), *episode.turns]:
        texts.append(as_text(turn.get("text", "")))
        for name in ("asked", "observation"):
            said = turn.get(name)
            if isinstance(said, list):
                texts += [message_text(m) for m in said if isinstance(m, dict)]
    texts += [as_text(attempt.get("error", "")) for attempt in episode.failed_attempts]
    texts += [episode.text("error"), episode.episode_id, episode.uid]
    program = episode.entries.get("program")
    if isinstance(program, dict):
        texts += [as_text(program.get(name) or "") for name in ("output", "errors")]
    task = episode.entries.get("task")
    if task:
        texts.append(as_text(task))
    return [text for text in texts if text]


def _turns(attempt: dict[str, Any]) -> list[dict[str, Any]]:
    turns = attempt.get("turns")
    return [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
