"""Goes through a step's file of episodes twice: outlines of all, then the episodes by group.

What fits into HELD_BYTES stays in memory between the two; other lines are read once more.
Invariant: a line that is no episode is a sentence in `faults`, and costs that line alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from features.viewer.records import (
    RecordedEpisode,
    RecordFile,
    RecordLine,
    parse_episode,
    read_lines,
)
from features.viewer.step_credit import StepCredit, read_algorithm
from features.viewer.token_columns import StepUpdate

# Lines of so many bytes are not read again when a step is gone through for the second time.
HELD_BYTES = 8 << 20


@dataclass(frozen=True)
class Outline:
    """Holds what a step needs of an episode before its page is made."""

    line: RecordLine
    uid: str
    episode_id: str
    reward: float


class StepReader:
    """Goes through a file of episodes twice: outlines of all, then episode by episode."""

    def __init__(self, file: RecordFile, update: StepUpdate | None) -> None:
        self._file = file
        self._update = update
        self.faults: list[str] = []
        self.outlines: list[Outline] = []
        self._turn_ids: dict[int, np.ndarray] = {}
        self._anchors: dict[str, list[str]] = {}
        # Episodes that need not be read a second time, by the number of their line.
        self._held: dict[int, RecordedEpisode] = {}
        self._held_bytes = 0
        for line, text in read_lines(file.path):
            if text.strip():
                self._outline(line, text)

    def _outline(self, line: RecordLine, text: bytes) -> None:
        """Keeps what the step needs of one line."""
        try:
            episode = parse_episode(text)
        except ValueError as error:
            self.faults.append(f"{self._file.path.name} line {line.number} {error}")
            return
        reward = episode.number("reward")
        self.outlines.append(Outline(line, episode.uid, episode.episode_id, reward))
        if self._held_bytes + line.length <= HELD_BYTES:
            self._held[line.number] = episode
            self._held_bytes += line.length
        states = [turn.get("anchor") for turn in episode.turns]
        if all(isinstance(state, str) for state in states) and states:
            self._anchors[episode.episode_id] = [str(state) for state in states]
        if self._update is None:
            return
        for number, row in enumerate(episode.rows):
            place = self._update.places.get((episode.episode_id, number))
            if place is not None:
                self._turn_ids[place] = row.tokens["turn_ids"]

    def credit(self, run_dir: Path) -> StepCredit:
        """Prepares what computes the step's advantages again."""
        assert self._update is not None
        columns = self._update.columns
        algorithm = read_algorithm(run_dir, columns.meta)
        return StepCredit.of(columns, algorithm, self._turn_ids, self._anchors)

    def groups(self) -> Iterator[list[Outline]]:
        """Yields the episodes by group, in the order of the groups' first lines."""
        groups: dict[str, list[Outline]] = {}
        for outline in self.outlines:
            groups.setdefault(outline.uid, []).append(outline)
        yield from groups.values()

    def read(self, outline: Outline) -> RecordedEpisode | None:
        """Returns a line's episode, once; None where its file had to be read again and has changed.

        What was held of it is held no longer.
        """
        held = self._held.pop(outline.line.number, None)
        if held is not None:
            return held
        with self._file.path.open("rb") as lines:
            lines.seek(outline.line.start)
            text = lines.read(outline.line.length)
        try:
            return parse_episode(text)
        except ValueError as error:
            self.faults.append(f"{self._file.path.name} line {outline.line.number} {error}")
            return None
