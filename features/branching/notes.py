"""Tells of branches and of measured credit beside the turns of recorded episodes.

    the record of an episode       its branches (recorded.py), under the turn that each began with
    RUN_DIR/credit/NAME            a court: the measured credit of a turn, and what estimators gave
    RUN_DIR, if it is a court's    likewise

A court plays episodes of its own. Its numbers stand beside a run's episode where that is one of
them: of that step and name, and all that the policy said is the same. Invariant: it reads files
alone, which may be damaged; a court that cannot be read is a sentence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from features.branching.credit import BranchedEpisode
from features.branching.files import ASKED, JUDGED_FILE, PAGE, RESULT
from features.branching.recorded import BRANCHES
from features.shared.turn_notes import NotedEpisode, NotedPage, TurnNote, TurnNotes
from training.config.plain_files import plain_lines, read_plain_text

# Another number where the same files are told otherwise.
FORM = 1
MOST_CHARS = 160
COURTS = "credit"
BRANCH_COLUMNS = (
    ("branch", "its number at this turn"),
    ("return", "what it earned from this turn on; nothing where it is left out"),
    ("ending", "how it ended"),
    ("differs in turn", "the first in which it says something else than the episode"),
    ("it says there", "its words from where they differ"),
    ("the episode says", "the words of the episode's own turn from there on"),
)
CREDIT_COLUMNS = (
    ("estimator", "what gave the turn its advantage"),
    ("gave", "mean advantage over the turn's tokens"),
    ("in its size", "divided by the slope, by which the estimator's advantages are too large"),
    ("less measured", "that, less the measured credit"),
)


def open_notes(run_dir: Path, episodes: Path) -> BranchNotes:
    """Opens what there is to tell of a run's episodes."""
    folders = [run_dir, *sorted(path for path in (run_dir / COURTS).glob("*") if path.is_dir())]
    notes = BranchNotes()
    stamps: list[Any] = []
    for folder in folders:
        files = [folder / name for name in (JUDGED_FILE, RESULT)]
        if not all(file.is_file() for file in files):
            continue
        stamps.append([str(folder), *(_stamp(file) for file in files)])
        try:
            notes.courts.append(HeldCourt.read(folder, is_own=folder == run_dir))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            notes.faults.append(f"the court in {folder} cannot be read: {error!r}")
            continue
        page = folder / PAGE
        if page.is_file():
            notes.pages.append(NotedPage(f"credit judged: {folder.name}", page))
    notes.key = json.dumps([FORM, stamps])
    return notes


def _stamp(file: Path) -> list[int]:
    """Returns what tells a file from another state of it."""
    found = os.stat(file)
    return [found.st_size, found.st_mtime_ns]


@dataclass
class BranchNotes(TurnNotes):
    """Tells of branches and of courts.

    Attributes:
        courts: that were held in the run's folder.
    """

    entries: tuple[str, ...] = (BRANCHES,)
    courts: list[HeldCourt] = field(default_factory=list)

    def of(self, episode: NotedEpisode) -> Sequence[TurnNote]:
        """Returns the notes on an episode's turns, the credit of each before its branches."""
        notes: list[TurnNote] = []
        for court in self.courts:
            notes += court.notes(episode)
        record = episode.entries.get(BRANCHES)
        if record is not None:
            notes += branch_notes(record, episode.turns)
        return notes


# Branches


def branch_notes(
    record: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]
) -> Iterator[TurnNote]:
    """Yields a note on the branches of each turn that has some.

    Args:
        record: the entry of an episode's record. turns: its turns.
    """
    by_turn: dict[int, list[Mapping[str, Any]]] = {}
    for branch in record["listed"]:
        by_turn.setdefault(int(branch["turn"]), []).append(branch)
    texts = [str(turn.get("text", "")) for turn in turns]
    own = dict(enumerate(record["own_returns"]))
    more = int(record.get("not_listed", 0))
    remark = f"Further branches of this episode, not recorded one by one: {more}." if more else ""
    for turn, branches in sorted(by_turn.items()):
        returns = [float(each["return"]) for each in branches if each["return"] is not None]
        yield TurnNote(
            turn=turn,
            title=_count(len(branches), "branch", "branches"),
            line=_returns_told(returns, len(branches) - len(returns), own.get(turn)),
            columns=BRANCH_COLUMNS,
            rows=[_branch_row(number, each, texts) for number, each in enumerate(branches, 1)],
            remark=remark,
        )


def _returns_told(returns: Sequence[float], left_out: int, own: float | None) -> str:
    """Says what the branches of a turn earned, and the episode itself."""
    parts = []
    if returns:
        low, high = min(returns), max(returns)
        told = f"return {low:.3g}"
        if low != high:
            told = f"return {sum(returns) / len(returns):.3g} on average, {low:.3g} to {high:.3g}"
        parts.append(told)
    if left_out:
        parts.append(f"{left_out} left out")
    if own is not None:
        parts.append(f"the episode itself {float(own):.3g}")
    return "; ".join(parts)


def _branch_row(number: int, branch: Mapping[str, Any], texts: Sequence[str]) -> list[str | float]:
    """Returns the cells of BRANCH_COLUMNS."""
    earned: str | float = "" if branch["return"] is None else float(branch["return"])
    ending = str(branch["ending"])
    if branch.get("left_out"):
        ending += f" (left out: {branch['left_out']})"
    differs = branch["differs"]
    if differs is None:
        return [number, earned, ending, "", "(all the same)", ""]
    turn, place = int(differs[0]), int(differs[1])
    own = "(has ended)"
    if turn < len(texts):
        own = texts[turn][place : place + MOST_CHARS] or "(nothing)"
    said = str(branch["words"])
    if not said:
        said = "(has ended)" if turn >= int(branch["turn"]) + int(branch["turns"]) else "(nothing)"
    return [number, earned, ending, turn + 1, said, own]


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


# Credit


@dataclass(frozen=True)
class JudgedEpisode:
    """Holds what a court says of an episode.

    Attributes:
        texts: what the policy wrote, by turn.
        halves: the credit of each turn by either half of its continuations.
        samples: continuations of each turn's state.
        given: by estimator what it gave each turn.
    """

    texts: list[str]
    halves: tuple[list[float], list[float]]
    samples: list[int]
    given: dict[str, list[float]]


@dataclass(frozen=True)
class HeldCourt:
    """Holds a court that was held: its episodes, by step and name.

    Attributes:
        name: of its folder.
        slopes: by estimator how many times too large its advantages are.
    """

    name: str
    truth: str
    slopes: dict[str, float]
    episodes: dict[tuple[int, str], JudgedEpisode]

    @classmethod
    def read(cls, folder: Path, *, is_own: bool) -> HeldCourt:
        """Reads a court's folder.

        Args:
            is_own: the episodes that are shown are the court's.
        Raises:
            OSError, ValueError, KeyError, TypeError, AttributeError: it is damaged.
        """
        result = json.loads(read_plain_text(folder / RESULT))
        slopes = {name: float(each["slope"][0]) for name, each in result["estimators"].items()}
        asked = json.loads(read_plain_text(folder / ASKED))
        turn_gamma = float(asked["config"]["algorithm"]["turn_gamma"])
        episodes = {}
        for line in plain_lines(folder / JUDGED_FILE):
            if not line.endswith(b"\n"):
                # It is being written.
                break
            batch = json.loads(line)
            first = 0
            for entry, texts in zip(batch["episodes"], batch["texts"], strict=True):
                judged = _judged_episode(entry, texts, batch["credit"], first, turn_gamma)
                episodes[int(batch["step"]), str(entry["episode_id"])] = judged
                first += len(texts)
        name = "" if is_own else folder.name
        return cls(name, str(result["truth"]), slopes, episodes)

    def notes(self, episode: NotedEpisode) -> Iterator[TurnNote]:
        """Yields a note on each turn of an episode that was judged."""
        judged = self.episodes.get((episode.step, episode.episode_id))
        if judged is None or episode.kind != "train":
            return
        if judged.texts != [turn.get("text") for turn in episode.turns]:
            return
        title = "credit" + (f", {self.name}" if self.name else "")
        for turn in range(len(judged.texts)):
            first, second = (half[turn] for half in judged.halves)
            measured = (first + second) / 2
            given = {name: credit[turn] for name, credit in judged.given.items()}
            told = ", ".join(f"{name} {credit:.3g}" for name, credit in given.items())
            yield TurnNote(
                turn=turn,
                title=title,
                line=(
                    f"measured {measured:.3g} (noisy: {first:.3g} and {second:.3g} by its two "
                    f"halves); {told}"
                ),
                columns=CREDIT_COLUMNS,
                rows=[self._row(name, credit, measured) for name, credit in given.items()],
                remark=(
                    f"The measure is of {judged.samples[turn]} continuations of the state before "
                    "the turn, and of as many behind it: of a single turn it is noisy. "
                    f"{self.truth}"
                ),
            )

    def _row(self, name: str, credit: float, measured: float) -> list[str | float]:
        """Returns the cells of CREDIT_COLUMNS."""
        slope = self.slopes.get(name, 0.0)
        if not 0 < slope < float("inf"):
            return [name, credit, "", ""]
        return [name, credit, credit / slope, credit / slope - measured]


def _judged_episode(
    entry: Mapping[str, Any],
    texts: Sequence[str],
    credit: Mapping[str, Sequence[float]],
    first: int,
    turn_gamma: float,
) -> JudgedEpisode:
    """Reads an episode of a batch, whose turns begin at `first` among the batch's."""
    branched = BranchedEpisode(**entry)
    halves = [branched.credit(half, turn_gamma).tolist() for half in (0, 1)]
    return JudgedEpisode(
        texts=[str(text) for text in texts],
        halves=(halves[0], halves[1]),
        samples=[len(returns) for returns in branched.returns],
        given={
            name: [float(number) for number in of_turns[first : first + len(texts)]]
            for name, of_turns in credit.items()
            # One that failed in a batch gave nothing there.
            if of_turns
        },
    )
