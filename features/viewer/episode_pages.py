"""Writes what a page shows of each episode, several episodes to a file, and all their texts.

Invariant: the members of a group are in one file where they fit, as they are shown together; a file
is closed once it is about PAGE_BYTES long.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from features.viewer.data_files import DataFolder, encode
from features.viewer.records import RecordedEpisode, all_texts, as_text, message_text
from features.viewer.token_columns import ShownTokens
from features.viewer.token_texts import TokenTexts

PAGE_BYTES = 1 << 18
# Characters of texts in a file: a search of all reads few files, a row in sight a small one.
TEXT_CHARS = 1 << 19
# Stands between two texts of a file.
BETWEEN_TEXTS = "\0"
# Files in a folder.
FOLDER_FILES = 1000
# Entries of an episode that stand elsewhere on its page.
SHOWN_ELSEWHERE = (
    "initial_messages",
    "turns",
    "rows",
    "failed_attempts",
    "tool_calls",
    "error",
    "program",
)


def numbered(name: str, number: int) -> str:
    """Returns the name of a data file of many."""
    return f"{name}/{number // FOLDER_FILES}/{number}"


@dataclass
class ShownNotes:
    """Holds what features tell beside an episode's turns.

    Attributes:
        notes: in JSON's types, as `TurnNote.as_plain` returns them.
        entries: of the record, that they show.
    """

    notes: list[dict[str, Any]] = field(default_factory=list)
    entries: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PageEpisode:
    """Holds what a page shows of an episode.

    Attributes:
        description: JSON's text.
        arrays: by "row.column".
        vocabulary: the text of each token id that occurs.
        tokens: of its responses, counted.
    """

    description: str
    arrays: dict[str, np.ndarray]
    vocabulary: dict[int, str]
    tokens: int

    @classmethod
    def of(
        cls,
        episode: RecordedEpisode,
        rows: list[ShownTokens],
        path: dict[str, Any],
        faults: list[str],
        texts: TokenTexts,
        noted: ShownNotes,
    ) -> "PageEpisode":
        """Gathers an episode's description, arrays and token texts."""
        arrays: dict[str, np.ndarray] = {}
        vocabulary: dict[int, str] = {}
        described = []
        for number, (row, recorded) in enumerate(zip(rows, episode.rows, strict=True)):
            prompt_ids = recorded.prompt_ids
            response_ids = recorded.tokens["response_ids"]
            for one in sorted({*prompt_ids.tolist(), *response_ids.tolist()}):
                vocabulary[one] = texts.of(one)
            arrays[f"{number}.prompt_ids"] = prompt_ids
            arrays[f"{number}.response_ids"] = response_ids
            for name, array in row.columns.items():
                arrays[f"{number}.{name}"] = array
            described.append(
                {
                    "columns": list(row.columns),
                    "parent": recorded.parent,
                    "seam": recorded.seam,
                    "aside": recorded.aside,
                    "in_update": row.place is not None,
                    "texts": texts.joined(response_ids),
                    "prompt_texts": texts.joined(prompt_ids),
                }
            )
        description = describe(episode, described, path, faults, noted)
        tokens = sum(len(recorded) for recorded in episode.rows)
        text = encode(description, recorded=recorded_parts(description))
        return cls(text, arrays, vocabulary, tokens)


class EpisodePages:
    """Collects episodes until a file is full; `page` is the number of the next one."""

    def __init__(self, folder: DataFolder, page: int = 0) -> None:
        self._folder = folder
        self.page = page
        self._episodes: list[str] = []
        self._arrays: dict[str, np.ndarray] = {}
        self._vocabulary: dict[int, str] = {}
        self._bytes = 0

    def add(self, episode: PageEpisode) -> tuple[int, int]:
        """Adds an episode; returns the number of its file and its place in that."""
        place = len(self._episodes)
        self._episodes.append(episode.description)
        self._vocabulary |= episode.vocabulary
        for name, array in episode.arrays.items():
            self._arrays[f"{place}.{name}"] = array
            self._bytes += array.nbytes
        return self.page, place

    def end_of_group(self) -> None:
        """Closes the file if it is full."""
        if self._bytes > PAGE_BYTES:
            self.write()

    @property
    def is_overfull(self) -> bool:
        """Returns whether even a group in the middle has to go to the next file."""
        return self._bytes > 4 * PAGE_BYTES

    def write(self) -> None:
        """Writes the file and begins another."""
        if not self._episodes:
            return
        header = {
            "ids": list(self._vocabulary),
            "texts": list(self._vocabulary.values()),
        }
        encoded = {"episodes": f"[{', '.join(self._episodes)}]"}
        self._folder.write(numbered("pages", self.page), header, self._arrays, encoded)
        self.page += 1
        self._episodes, self._arrays, self._vocabulary, self._bytes = [], {}, {}, 0


def describe(
    episode: RecordedEpisode,
    rows: list[dict[str, Any]],
    path: dict[str, Any],
    faults: list[str],
    noted: ShownNotes,
) -> dict[str, Any]:
    """Returns all of an episode but its arrays."""
    elsewhere = {*SHOWN_ELSEWHERE, *noted.entries}
    facts = {name: value for name, value in episode.entries.items() if name not in elsewhere}
    description = {
        "id": episode.episode_id,
        "uid": episode.uid,
        "messages": messages(episode.initial_messages),
        "turns": [describe_turn(turn) for turn in episode.turns],
        "failed_attempts": [describe_attempt(attempt) for attempt in episode.failed_attempts],
        "error": episode.text("error"),
        "program": describe_program(episode.entries.get("program")),
        "facts": facts,
        "rows": rows,
        "path": path,
        "faults": faults,
    }
    if noted.notes:
        description["notes"] = noted.notes
    return description


def recorded_parts(description: dict[str, Any]) -> list[Any]:
    """Lists what stands in a description as it was recorded, however deep it may be nested."""
    turns = list(description["turns"])
    for attempt in description["failed_attempts"]:
        turns += attempt["turns"]
    parts = [description["facts"], *(row["parent"] for row in description["rows"])]
    parts += [turn["facts"] for turn in turns]
    return parts + [turn["behind"] for turn in turns if "behind" in turn]


def describe_program(record: Any) -> list[list[str]]:
    """Returns what a page shows of a program: names and texts; nothing where there was none."""
    if not isinstance(record, dict):
        return []
    shown = []
    for name, value in record.items():
        if isinstance(value, dict):
            value = ", ".join(
                f"{of_it} {as_text(count)}" for of_it, count in value.items() if count
            )
        if value not in (None, ""):
            shown.append([as_text(name), as_text(value)])
    return shown


def messages(recorded: Any) -> list[list[str]]:
    """Returns role and text of each message; anything but a list of messages as its JSON."""
    if not isinstance(recorded, list):
        return [["", as_text(recorded)]] if recorded else []
    shown = []
    for message in recorded:
        if isinstance(message, dict):
            shown.append([as_text(message.get("role", "")), message_text(message)])
        else:
            shown.append(["", as_text(message)])
    return shown


def describe_turn(turn: dict[str, Any]) -> dict[str, Any]:
    """Returns what a page shows of a turn."""
    kept = (
        "reward",
        "finish_reason",
        "done",
        "engine_seconds",
        "env_seconds",
        "tool_calls",
        "info",
        "anchor",
        "writes",
        "aside",
        "trained",
        "replaces_history",
    )
    facts = {name: turn[name] for name in kept if turn.get(name) not in (None, [], {}, "")}
    shown: dict[str, Any] = {
        "text": as_text(turn.get("text", "")),
        "observation": messages(turn.get("observation")),
        "facts": facts,
    }
    if isinstance(turn.get("asked"), list):
        shown["asked"] = messages(turn["asked"])
        shown["behind"] = turn.get("behind")
    return shown


def describe_attempt(attempt: dict[str, Any]) -> dict[str, Any]:
    """Returns what a page shows of an attempt that failed and was played again."""
    turns = attempt.get("turns")
    shown = [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    return {
        "turns": [describe_turn(turn) for turn in shown],
        "ending": as_text(attempt.get("ending", "")),
        "error": as_text(attempt.get("error", "") or ""),
    }


class TextPages:
    """Collects the texts that a search looks into, several episodes to a file.

    A file holds all of them as one, so that a page looks through it at once, and where each
    episode's end: `ends` (episodes,) uint32, in UTF-16 units, of BETWEEN_TEXTS behind its last.
    Where all is ASCII, `ascii` (units,) uint8 has it, else `units` (units,) uint16.
    """

    def __init__(self, folder: DataFolder, page: int = 0) -> None:
        self._folder = folder
        self.page = page
        self._first = 0
        self._texts: list[list[str]] = []
        self._length = 0

    def add(self, number: int, texts: list[str]) -> int:
        """Adds an episode's texts; returns the number of their file."""
        if not self._texts:
            self._first = number
        self._texts.append(texts)
        self._length += sum(map(len, texts))
        page = self.page
        if self._length > TEXT_CHARS:
            self.write()
        return page

    def write(self) -> None:
        """Writes the file and begins another."""
        if self._texts:
            arrays = joined_texts(self._texts)
            self._folder.write(numbered("texts", self.page), {"first": self._first}, arrays)
            self.page += 1
        self._texts, self._length = [], 0


def joined_texts(episodes: list[list[str]]) -> dict[str, np.ndarray]:
    """Returns the arrays of a file of texts, as `TextPages` says, of those of `episode_texts`."""
    blocks = ["".join(text + BETWEEN_TEXTS for text in texts) for texts in episodes]
    whole = "".join(blocks)
    if whole.isascii():
        ends = np.cumsum([len(block) for block in blocks], dtype=np.uint32)
        return {"ends": ends, "ascii": np.frombuffer(whole.encode("ascii"), dtype=np.uint8)}
    encoded = [block.encode("utf-16-le", "surrogatepass") for block in blocks]
    ends = np.cumsum([len(block) // 2 for block in encoded], dtype=np.uint32)
    return {"ends": ends, "units": np.frombuffer(b"".join(encoded), dtype="<u2")}


def episode_texts(episode: RecordedEpisode) -> list[str]:
    """Returns the texts that are searched, without those that an episode says twice.

    What marks the end of a text is a blank within one.
    """
    return list(dict.fromkeys(text.replace(BETWEEN_TEXTS, " ") for text in all_texts(episode)))
