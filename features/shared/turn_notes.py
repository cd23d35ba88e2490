"""What a feature tells beside the turns of recorded episodes: `turn_notes` of a `Feature`.

Whoever shows episodes opens what features have to tell of a run, and asks for each episode:

    open_turn_notes(run_dir, episodes) -> TurnNotes.of(episode) -> TurnNote, TurnNote, …

Invariant: a note is texts and numbers alone, so that whoever shows it knows nothing of where it
comes from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.loading import load_object
from training.features import named


@dataclass(frozen=True, kw_only=True)
class NotedEpisode:
    """Names a recorded episode.

    Attributes:
        kind: "train", or "val" of a validation's. step: of training.
        turns, entries: the turns of its record, and the record's other entries but its rows; both
            are what a file says, and may be damaged.
    """

    kind: str
    step: int
    episode_id: str
    turns: Sequence[Mapping[str, Any]]
    entries: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TurnNote:
    """Tells something beside a turn: a line, and a table to open.

    Attributes:
        turn: its number, from 0 on.
        title: a word or two on what it is.
        line: a sentence.
        columns: of each its name, and a sentence on what it says.
        rows: of each a cell for each column. A text may be anybody's.
        remark: a sentence below the table; "": none.
    """

    turn: int
    title: str
    line: str
    columns: Sequence[tuple[str, str]] = ()
    rows: Sequence[Sequence[str | float]] = ()
    remark: str = ""

    def as_plain(self) -> dict[str, Any]:
        """Returns it as a page has it."""
        return {
            "turn": self.turn,
            "title": self.title,
            "line": self.line,
            "columns": [list(column) for column in self.columns],
            "rows": [list(row) for row in self.rows],
            "remark": self.remark,
        }


@dataclass(frozen=True)
class NotedPage:
    """Names a page that belongs to a run: what its link says, and its file."""

    text: str
    file: Path


@dataclass
class TurnNotes:
    """Tells of a run's episodes; a feature has a subclass of its own.

    Attributes:
        key: a text that is another one wherever the notes would be others.
        entries: of the records, that the notes show.
        pages: of the run, to which links lead.
        faults: sentences on what could not be read.
    """

    key: str = ""
    entries: tuple[str, ...] = ()
    pages: list[NotedPage] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def of(self, episode: NotedEpisode) -> Sequence[TurnNote]:
        """Returns the notes on an episode's turns."""
        raise NotImplementedError


def open_turn_notes(run_dir: Path, episodes: Path) -> tuple[dict[str, TurnNotes], list[str]]:
    """Opens what features tell of a run's episodes.

    Args:
        run_dir, episodes: the folders of the run and of its episodes.
    Returns: the notes by feature, and a sentence on each feature that raised.
    """
    opened: dict[str, TurnNotes] = {}
    faults: list[str] = []
    for feature, place in named("turn_notes"):
        try:
            notes = load_object(place, f"feature {feature}")(run_dir, episodes)
        except MemoryError:
            raise
        # What it reads may be damaged, or a stranger's.
        except Exception as error:
            faults.append(f"features/{feature} tells nothing beside turns: {error!r}")
            continue
        if notes is not None:
            opened[feature] = notes
            faults += notes.faults
    return opened, faults
