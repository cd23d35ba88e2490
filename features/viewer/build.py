"""Makes the viewer of one run or several: reads records step by step, writes pages as it goes.

A step is gone through twice (`step_reader`): first a line at a time for what its groups and its
estimator need of all episodes, then group by group for the pages. Files of data end where a step
does, so that the viewer of a run that goes on keeps those of the steps that it has: `kept_state`
says where to go on. Invariant: memory holds one step's outlines, some of its episodes and one file
of pages, not the run; the old viewer stays until the new one is whole, and is then replaced or,
where it is kept, gets another manifest; and a viewer that was made bit by bit has the bytes of one
that is made at once.
"""

import fcntl
import gc
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from features.shared import ELEMENTS
from features.shared.turn_notes import NotedEpisode, TurnNotes, open_turn_notes
from features.viewer.credit_path import credit_path
from features.viewer.data_files import DataFolder, plain
from features.viewer.episode_pages import (
    EpisodePages,
    PageEpisode,
    ShownNotes,
    TextPages,
    episode_texts,
    numbered,
)
from features.viewer.kept_state import (
    BuilderState,
    KeptState,
    count_settled,
    read_state,
    stamp,
    write_state,
)
from features.viewer.list_columns import (
    beginning,
    fate_bits,
    flags,
    last_answer,
    list_numbers,
    task_key,
    task_label,
    tool_names,
)
from features.viewer.parts import Parts, ViewerPart
from features.viewer.progress import showing
from features.viewer.records import (
    RecordedEpisode,
    RecordFile,
    list_files,
)
from features.viewer.search_index import SearchIndex
from features.viewer.step_credit import StepCredit
from features.viewer.step_reader import Outline, StepReader
from features.viewer.token_columns import (
    COLUMNS,
    FateNames,
    StepUpdate,
    join_rows,
    token_columns,
)
from features.viewer.token_texts import TokenTexts, find_tokenizer
from features.viewer.update_columns import read_update
from training.config.plain_files import plain_lines
from training.run.files import folder_in_the_making

ASSETS = Path(__file__).parent / "assets"
# A viewer's folder has it; no other folder is replaced.
MARK = "manifest.js"
DATA = "data"
# A record that holds something else than it should makes the code below raise these.
DAMAGE = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
# So many faults are told one by one.
MOST_FAULTS = 200


@dataclass(frozen=True)
class RecordedRun:
    """Names a run: its folder, and that of its episodes."""

    number: int
    folder: Path
    episodes: Path

    @property
    def label(self) -> str:
        """Returns what the run is called on a page."""
        return "/".join(self.folder.resolve().parts[-2:])


@dataclass(frozen=True)
class Step:
    """Holds what all episodes of a file share while they are written."""

    run: RecordedRun
    file: RecordFile
    update: StepUpdate | None
    credit: StepCredit | None
    texts: TokenTexts
    notes: Mapping[str, TurnNotes]


@dataclass
class ViewerReport:
    """Counts what was made, and keeps what was wrong."""

    episodes: int = 0
    steps: int = 0
    tokens: int = 0
    faults: list[str] = field(default_factory=list)
    further_faults: int = 0
    seconds: float = 0.0
    size: int = 0

    def add_fault(self, text: str) -> None:
        """Keeps a sentence about something that could not be read."""
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(text)
        else:
            self.further_faults += 1


def build_viewer(
    runs: Sequence[RecordedRun],
    out: Path,
    *,
    goes_on: bool = False,
    with_episodes: bool = True,
    shows_progress: bool = True,
) -> ViewerReport:
    """Writes the viewer of the runs as the folder `out`, in place of an older one.

    Args:
        goes_on: the run goes on, and the viewer is made again: it says so.
        with_episodes: False: it has none, as that of a run that begins.
        shows_progress: how far it is goes to standard error.

    Raises:
        ValueError: `out` is a folder that is no viewer, or has other files in it.
        OSError: it cannot be written.
    """
    started = time.monotonic()
    # A link leads to the folder that is meant.
    out = out.resolve()
    require_replaceable(out)
    sources = [read_source(run) for run in runs] if with_episodes else []
    report = None
    if len(sources) == 1:
        report = _go_on(sources[0], out, goes_on=goes_on, shows_progress=shows_progress)
    if report is None:
        report = _make_anew(runs, sources, out, goes_on=goes_on, shows_progress=shows_progress)
    report.seconds = time.monotonic() - started
    return report


@dataclass(frozen=True)
class RunSource:
    """Holds what a run's episodes are read from, as it was when the reading began.

    Attributes:
        files: by step, a validation behind the training of its step.
        stamps: of each file, so that a later change is seen.
        problem: what is to be said where there is no tokenizer.
        notes: of features, beside turns; problems_of_notes: what is to be said of these.
    """

    run: RecordedRun
    files: list[RecordFile]
    stamps: list[list[Any]]
    texts: TokenTexts
    problem: str
    notes: dict[str, TurnNotes]
    problems_of_notes: list[str]

    @property
    def key(self) -> str:
        """Returns what a kept viewer must agree in beside the files."""
        told = [str(self.run.folder), str(self.run.episodes), self.problem]
        of_notes = {feature: notes.key for feature, notes in self.notes.items()}
        return json.dumps([*told, of_notes, self.problems_of_notes])


def read_source(run: RecordedRun) -> RunSource:
    """Looks for a run's files and its tokenizer."""
    files = sorted(list_files(run.episodes), key=lambda file: (file.step, file.kind))
    stamps = [stamp(file) for file in files]
    tokenizer, problem = find_tokenizer(run.folder, run.episodes)
    notes, problems = open_turn_notes(run.folder, run.episodes)
    return RunSource(run, files, stamps, TokenTexts(tokenizer), problem, notes, problems)


def _make_anew(
    runs: Sequence[RecordedRun],
    sources: Sequence[RunSource],
    out: Path,
    *,
    goes_on: bool,
    shows_progress: bool,
) -> ViewerReport:
    """Makes a viewer of all records beside the old one, and puts it into its place."""
    # Two may be made at the same time, and nobody's folder has this name.
    with folder_in_the_making(out, ".new") as temporary:
        builder = ViewerBuilder(temporary)
        settled = _add_all(builder, sources, 0, goes_on=goes_on, shows_progress=shows_progress)
        needed = builder.shown | {part.number for part in settled.parts}
        if len(sources) == 1:
            builder.keep(sources[0].key, settled, needed, builder.known)
        builder.finish(runs, goes_on=goes_on, pages=linked_pages(sources, out))
        builder.tidy(needed, builder.known)
        for asset in [ELEMENTS, *sorted(ASSETS.iterdir())]:
            if asset.is_file():
                shutil.copyfile(asset, temporary / asset.name)
        builder.measure()
        require_replaceable(out)
        _take_place(temporary, out)
    return builder.report


def _go_on(
    source: RunSource, out: Path, *, goes_on: bool, shows_progress: bool
) -> ViewerReport | None:
    """Adds to a viewer what is new; None where it has to be made anew.

    Its manifest is written last, so that whoever opens it meanwhile sees the one before. What that
    one names stays until the next time while the run goes on.
    """
    data = out / DATA
    with _held(data) as is_still_there:
        kept = read_state(data, source.key, source.files) if is_still_there() else None
        if kept is None:
            return None
        builder = ViewerBuilder(out, kept)
        done = len(kept.builder.files)
        settled = _add_all(builder, [source], done, goes_on=goes_on, shows_progress=shows_progress)
        if not is_still_there():
            raise OSError(f"{out} was replaced while it was added to")
        needed = builder.shown | {part.number for part in settled.parts}
        if goes_on:
            needed |= set(kept.shown)
        on_disk = [*kept.parts, *builder.known]
        builder.keep(source.key, settled, needed, on_disk)
        builder.finish([source.run], goes_on=goes_on, pages=linked_pages([source], out))
        builder.tidy(needed, on_disk)
        if not goes_on:
            builder.measure()
    return builder.report


def linked_pages(sources: Sequence[RunSource], out: Path) -> list[list[str]]:
    """Lists what features' links to pages of a run say, and their addresses.

    There are none in a viewer that stands elsewhere than in the run's folder: it may be sent.
    """
    linked = []
    for source in sources:
        if out.parent != source.run.folder.resolve():
            continue
        for notes in source.notes.values():
            for page in notes.pages:
                address = os.path.relpath(page.file.resolve(), out)
                linked.append([page.text, quote(address)])
    return linked


@contextmanager
def _held(data: Path) -> Iterator[Callable[[], bool]]:
    """Locks a viewer's data against others that add to it; hands out whether it is there still."""
    try:
        handle = os.open(data, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield lambda: False
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        inode = os.fstat(handle).st_ino
        yield lambda: data.is_dir() and data.stat().st_ino == inode
    except BlockingIOError:
        yield lambda: False
    finally:
        os.close(handle)


def _take_place(new: Path, out: Path) -> None:
    """Renames a whole viewer to its name, and only then removes the one that was there."""
    if not out.exists():
        new.rename(out)
        return
    with folder_in_the_making(out, ".old") as old:
        out.rename(old)
        try:
            new.rename(out)
        except OSError:
            old.rename(out)
            raise


def _add_all(
    builder: "ViewerBuilder",
    sources: Sequence[RunSource],
    done: int,
    *,
    goes_on: bool,
    shows_progress: bool,
) -> BuilderState:
    """Adds the episodes of the runs, of the first one from the file number `done` on.

    Returns: where the builder stood behind the last file that is not written to any more.
    """
    files = [file for source in sources for file in source.files][done:]
    settled = builder.state([])
    with (
        showing(count_episodes(files), len(files))
        if shows_progress and sources
        else _silent() as advance
    ):
        for source in sources:
            builder.begin_run(source, is_new=done == 0)
            whole = max(done, count_settled(source.files, goes_on=goes_on))
            builder.add_files(source, slice(done, whole), advance)
            settled = builder.state(source.stamps[:whole])
            builder.add_files(source, slice(whole, None), advance)
            done = 0
    return settled


@contextmanager
def _silent() -> Iterator[Callable[[], None]]:
    yield lambda: None


def count_episodes(files: Sequence[RecordFile]) -> int:
    """Counts the lines of files, each an episode; a file that cannot be read has none."""
    count = 0
    for file in files:
        # Its faults are told when its episodes are read.
        with suppress(OSError):
            count += sum(1 for line in plain_lines(file.path) if line.strip())
    return count


def require_replaceable(out: Path) -> None:
    """Raises ValueError where a place holds anything but a viewer, which is then left as it is."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"{out} is a file: name a folder with --out")
    if not any(out.iterdir()):
        return
    mark = out / MARK
    if not mark.is_file() or not mark.read_bytes().startswith(b'viewerData("manifest"'):
        raise ValueError(f"{out} is there and is no viewer: name another folder with --out")
    foreign = sorted(path.name for path in out.iterdir() if not _is_of_viewer(path))
    if foreign:
        raise ValueError(
            f"{out} is a viewer, but {', '.join(foreign[:3])} in it is not of one, and would be "
            "lost: move it, or name another folder with --out"
        )


def _is_of_viewer(path: Path) -> bool:
    return path.name == DATA or path.suffix in (".js", ".css", ".html")


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keeps Python from looking for cycles in the block: a step makes none, but many objects.

    Each look goes over all that the process has, a fifth of the time that a viewer takes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class ViewerBuilder:
    """Writes the data of a viewer, run by run.

    Args:
        folder: the viewer's.
        kept: what lies in it already, and is added to.
    """

    def __init__(self, folder: Path, kept: KeptState | None = None) -> None:
        state = BuilderState() if kept is None else kept.builder
        self.report = ViewerReport(**state.report)
        self._folder = folder
        self._data = DataFolder(folder / DATA)
        self._parts = Parts(self._data, state.parts, next_number=state.next_part)
        self._pages = EpisodePages(self._data, state.pages)
        self._texts = TextPages(self._data, state.text_pages)
        self._fates = FateNames(dict(state.fates))
        self._sentences = {**COLUMNS, **state.columns}
        self._steps = list(state.steps)
        self._episodes = state.episodes
        # The list's rows of the file of records that is read, and its index.
        self._rows: list[dict[str, Any]] = []
        self._index = self._new_index()
        shutil.rmtree(self._temporary, ignore_errors=True)

    @property
    def _temporary(self) -> Path:
        return self._folder / DATA / "search.tmp"

    def _new_index(self) -> SearchIndex:
        return SearchIndex(self._temporary, self._episodes)

    @property
    def known(self) -> list[ViewerPart]:
        """Returns all parts that were written, or were there."""
        return self._parts.known

    @property
    def shown(self) -> set[int]:
        """Returns the numbers of the parts that the manifest names."""
        return {part.number for part in self._parts.parts}

    def state(self, stamps: list[list[Any]]) -> BuilderState:
        """Returns where the builder stands behind the files of these stamps."""
        report = {
            "episodes": self.report.episodes,
            "steps": self.report.steps,
            "tokens": self.report.tokens,
            "faults": list(self.report.faults),
            "further_faults": self.report.further_faults,
        }
        return BuilderState(
            files=stamps,
            episodes=self._episodes,
            pages=self._pages.page,
            text_pages=self._texts.page,
            next_part=self._parts.next_number,
            parts=list(self._parts.parts),
            steps=list(self._steps),
            fates=dict(self._fates.sentences),
            columns=dict(self._sentences),
            report=report,
        )

    def keep(
        self, key: str, settled: BuilderState, needed: set[int], on_disk: Sequence[ViewerPart]
    ) -> None:
        """Writes where the next one goes on, and what will lie in the folder then.

        Args:
            needed: the numbers of the parts that stay.
            on_disk: all whose files may be there.
        """
        self._data.folder.mkdir(parents=True, exist_ok=True)
        left = {part.number: part for part in on_disk if part.number in needed}
        parts = [left[number] for number in sorted(left)]
        write_state(self._data.folder, key, settled, parts, sorted(self.shown))

    def begin_run(self, source: RunSource, *, is_new: bool) -> None:
        """Tells what is wrong with a run as a whole, once."""
        if is_new and source.problem:
            self.report.add_fault(f"{source.run.label}: {source.problem}")
        if is_new:
            for problem in source.problems_of_notes:
                self.report.add_fault(f"{source.run.label}: {problem}")

    def add_files(self, source: RunSource, which: slice, advance: Callable[[], None]) -> None:
        """Writes all episodes of some of a run's files; `advance` is called after each."""
        for file in source.files[which]:
            with _without_collections():
                try:
                    self._add_step(source, file, advance)
                except OSError as error:
                    self.report.add_fault(f"{source.run.label}: {file.path.name}: {error}")
                self._end_file()

    def _end_file(self) -> None:
        """Writes what waits of a file of records: no file of data reaches into the next one."""
        self._pages.write()
        self._texts.write()
        if self._rows:
            self._parts.add(self._rows, self._index, self._episodes - len(self._rows))
        self._rows = []
        self._index = self._new_index()

    def _add_step(self, source: RunSource, file: RecordFile, advance: Callable[[], None]) -> None:
        """Writes the episodes of a step, or of a validation."""
        run = source.run
        update = self._read_update(run, file)
        reader = StepReader(file, update)
        credit = None
        if update is not None:
            try:
                credit = reader.credit(run.folder)
            except DAMAGE as error:
                self.report.add_fault(f"{run.label}: {file.update_path.name}: {error}")
        step = Step(run, file, update, credit, source.texts, source.notes)
        self._note_step(step)
        self.report.steps += 1
        for group in reader.groups():
            rewards = {outline.reward for outline in group}
            no_spread = len(group) > 1 and len(rewards) == 1
            for outline in group:
                self._add_line(reader, outline, step, no_spread)
                advance()
            self._pages.end_of_group()
        for fault in reader.faults:
            self.report.add_fault(f"{run.label}: {fault}")

    def _add_line(self, reader: StepReader, outline: Outline, step: Step, no_spread: bool) -> None:
        """Writes the episode of a line; what its record lacks costs that episode alone."""
        try:
            episode = reader.read(outline)
            prepared = None if episode is None else self._prepare(episode, step, no_spread)
        except DAMAGE as error:
            where = f"{step.file.path.name} line {outline.line.number}"
            reader.faults.append(f"{where} cannot be shown: {error!r}")
            return
        if prepared is not None:
            self._add_prepared(prepared)

    def _read_update(self, run: RecordedRun, file: RecordFile) -> StepUpdate | None:
        """Reads what the step's update was given; None where there is none."""
        if file.kind == "val" or not file.update_path.exists():
            return None
        try:
            columns = read_update(file.update_path)
        except ValueError as error:
            self.report.add_fault(f"{run.label}: {error}")
            return None
        for fault in columns.faults:
            self.report.add_fault(f"{run.label}: {fault}")
        sentences = columns.meta.get("columns")
        if isinstance(sentences, dict):
            self._sentences.update({str(k): str(v) for k, v in sentences.items()})
        return StepUpdate.of(columns, self._fates)

    def _note_step(self, step: Step) -> None:
        """Keeps what the pages say of the step's settings."""
        meta = {} if step.update is None else dict(step.update.columns.meta)
        for name in ("fates", "columns", "dropped", "metrics"):
            meta.pop(name, None)
        place = {"run": step.run.number, "kind": step.file.kind, "step": step.file.step}
        self._steps.append({**place, "settings": meta})

    def _prepare(self, episode: RecordedEpisode, step: Step, no_spread: bool) -> "Prepared":
        """Works out all that is shown of an episode, before any of it is written."""
        rows, faults = token_columns(episode, step.update, step.file.kind, self._fates)
        path = credit_path(episode, join_rows(rows), step.credit)
        marks = flags(episode, rows, step.file.step)
        marks["no_spread"] = no_spread
        row = {
            **list_numbers(episode, rows, gradient_of(step.update, rows)),
            "run": step.run.number,
            "val": int(step.file.kind == "val"),
            "step": step.file.step,
            "fates": fate_bits(rows),
            "flags": marks,
            "episode_id": episode.episode_id,
            "uid": episode.uid,
            "ending": episode.text("ending"),
            # `environment` is a number where there is one.
            "source": episode.text("data_source") or episode.text("environment"),
            "task": task_key(episode),
            "task_name": task_label(episode),
            "answer": last_answer(episode),
            "beginning": beginning(episode),
            "tools": "\n".join(tool_names(episode)),
        }
        noted, of_notes = turn_notes(episode, step)
        page = PageEpisode.of(episode, rows, path, faults + of_notes, step.texts, noted)
        return Prepared(row, page, episode_texts(episode))

    def _add_prepared(self, prepared: "Prepared") -> None:
        """Writes an episode: its page, its texts and its row of the list."""
        number = self._episodes
        page, place = self._pages.add(prepared.page)
        self._index.add(number, prepared.texts)
        text_page = self._texts.add(number, prepared.texts)
        places = {"page": page, "in_page": place, "text_page": text_page}
        self._rows.append({**prepared.row, **places})
        self._episodes += 1
        self.report.episodes += 1
        self.report.tokens += prepared.page.tokens
        if self._pages.is_overfull:
            self._pages.write()

    def finish(
        self, runs: Sequence[RecordedRun], *, goes_on: bool, pages: Sequence[Sequence[str]] = ()
    ) -> None:
        """Writes the manifest.

        Args:
            pages: that belong to the runs: what their links say, and their addresses.
        """
        labels = [run.label for run in runs]
        manifest = {
            "runs": [
                {
                    "label": run.label if labels.count(run.label) == 1 else str(run.folder),
                    "folder": str(run.folder),
                    "episodes": str(run.episodes),
                }
                for run in runs
            ],
            "goes_on": goes_on,
            "steps": self._steps,
            "episodes": self._episodes,
            "parts": [
                {
                    "number": part.number,
                    "first": part.first,
                    "episodes": part.episodes,
                    "files": part.files,
                }
                for part in self._parts.parts
            ],
            "fates": [list(entry) for entry in self._fates.sentences.items()],
            "columns": self._sentences,
            "faults": self.report.faults,
            "further_faults": self.report.further_faults,
        }
        if pages:
            manifest["pages"] = pages
        DataFolder(self._folder).write("manifest", plain(manifest), {})

    def tidy(self, needed: set[int], on_disk: Sequence[ViewerPart]) -> None:
        """Takes away parts that were merged, and what one that was cut off had written further.

        Args: those of `keep`.
        """
        for part in on_disk:
            if part.number not in needed:
                for name in part.files_of():
                    self._data.path(name).unlink(missing_ok=True)
                with suppress(OSError):
                    self._data.path(f"search/{part.number}").with_suffix("").rmdir()
        for name, number in (("pages", self._pages.page), ("texts", self._texts.page)):
            path = self._data.path(numbered(name, number))
            while path.exists():
                path.unlink()
                number += 1
                path = self._data.path(numbered(name, number))

    def measure(self) -> None:
        """Counts the bytes of all files."""
        files = [path for path in self._folder.rglob("*") if path.is_file()]
        self.report.size = sum(path.stat().st_size for path in files)


@dataclass(frozen=True)
class Prepared:
    """Holds an episode's row of the list, its page, and the texts that are searched."""

    row: dict[str, Any]
    page: PageEpisode
    texts: list[str]


def turn_notes(episode: RecordedEpisode, step: Step) -> tuple[ShownNotes, list[str]]:
    """Asks features what they tell beside an episode's turns; one that raises is a sentence."""
    noted = NotedEpisode(
        kind=step.file.kind,
        step=step.file.step,
        episode_id=episode.episode_id,
        turns=episode.turns,
        entries=episode.entries,
    )
    shown = ShownNotes()
    faults = []
    for feature, notes in step.notes.items():
        try:
            of_feature = [note.as_plain() for note in notes.of(noted)]
        except MemoryError:
            raise
        # What it reads of a record may be damaged.
        except Exception as error:
            faults.append(f"what features/{feature} tells of it cannot be shown: {error!r}")
            continue
        shown.notes += of_feature
        shown.entries += notes.entries
    return shown, faults


def gradient_of(update: StepUpdate | None, rows: list[Any]) -> float:
    """Sums the recorded shares of the gradient of an episode's rows; NaN where there are none."""
    if update is None or "gradient_share" not in update.columns.rows:
        return float("nan")
    shares = update.columns.rows["gradient_share"]
    places = [row.place for row in rows if row.place is not None]
    return float(shares[places].sum()) if places else float("nan")
