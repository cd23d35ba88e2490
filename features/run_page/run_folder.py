"""Reads a run's folder: what its page is made of.

Invariant: every file may be missing, broken off or damaged; a folder of which only metrics.jsonl is
left has a page, too. Nothing is written, and a run that goes on is not disturbed.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from features.run_page.events import FAILED, FILE, FINISHED, INTERRUPTED, Event, read_events
from features.run_page.metric_store import MetricStore
from features.run_page.settings import Change, changes_of_folder, read_settings
from training.config.plain_files import special_file
from training.run.run_lock import OWNER_FILE, is_held

RUNNING = "running"
CRASHED = "crashed"
UNKNOWN = "unknown"
VIEWER = Path("viewer") / "index.html"


@dataclass(frozen=True)
class Status:
    """Says how a run stands.

    Attributes:
        word: running, finished, interrupted, crashed or unknown.
        line: what ended it, or what is known.
    """

    word: str
    line: str = ""


@dataclass
class RunFolder:
    """Holds what a run's folder says.

    Attributes:
        is_own: the run is this process's, and goes on.
        viewer: the page of its episodes; None: the one in its folder.
    """

    path: Path
    metrics: MetricStore = field(default_factory=MetricStore)
    events: list[Event] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    is_own: bool = False
    viewer: Path | None = None

    @property
    def viewer_page(self) -> Path:
        """Returns the page of the run's episodes, whether it is there or not."""
        return self.viewer or self.path / VIEWER

    @classmethod
    def read(cls, path: Path, *, is_own: bool = False) -> "RunFolder":
        """Reads a folder.

        Raises:
            ValueError: nothing in it is of a run.
        """
        path = path.absolute()
        # A run's own folder holds what the run has written.
        special = None if is_own else special_file(path)
        if special is not None:
            raise ValueError(
                f"{special} is no regular file, or too large for what it is: no run writes it"
            )
        settings = read_settings(path / "config.yaml")
        folder = cls(
            path=path,
            metrics=MetricStore.read(path / "metrics.jsonl"),
            events=list(read_events(path / FILE)),
            settings=settings,
            changes=changes_of_folder(path, settings),
            is_own=is_own,
        )
        if not folder.metrics.names and not folder.events and not is_own:
            raise ValueError(
                f"{path} holds no steps and no events of a run; a run writes metrics.jsonl when "
                "trainer.logger has 'file'"
            )
        return folder

    @property
    def name(self) -> str:
        """Returns the last two parts of the folder's path."""
        return "/".join(self.path.resolve().parts[-2:])

    @property
    def starts(self) -> list[Event]:
        """Lists the events with which processes of the run began."""
        return [event for event in self.events if event["kind"] in ("start", "resume")]

    @property
    def code(self) -> str:
        """Returns the digest of the code of the last process; "" where none is recorded."""
        return code_of(self.events)

    @property
    def has_viewer(self) -> bool:
        """Checks whether a viewer of the run's episodes has been made."""
        return self.viewer_page.is_file()

    @property
    def has_episodes(self) -> bool:
        """Checks whether the run's episodes lie where the viewer finds them by itself."""
        folder = self.settings.get("records.folder") or self.path / "episodes"
        return Path(str(folder)).is_dir()

    @property
    def last_step(self) -> int:
        """Returns the last step that metrics or events know of."""
        steps = [event["step"] for event in self.events]
        return max([self.metrics.last_step, *steps])

    def status(self) -> Status:
        """Says whether the run goes on, or how it ended."""
        of_processes = [event for event in self.events if event["kind"] in PROCESS_STATUS]
        last = of_processes[-1] if of_processes else None
        if last is not None and last["kind"] == "end":
            return _ended(last)
        if self.is_own or is_held(self.path):
            return Status(RUNNING, _line_of_start(last))
        if last is not None and last["kind"] == "restart":
            return Status(CRASHED, last["text"])
        owner = self.path / OWNER_FILE
        left_behind = owner.is_file() and owner.stat().st_size > 0
        if last is not None or left_behind:
            return Status(
                CRASHED,
                "its process ended without a word, as a kill or a lost machine ends it; the last "
                f"step that it recorded is {self.last_step}",
            )
        return Status(UNKNOWN, "no process holds the folder, and nothing says how the run ended")


PROCESS_STATUS = ("start", "resume", "restart", "end")


def _ended(event: Event) -> Status:
    words = {FINISHED: FINISHED, INTERRUPTED: INTERRUPTED, FAILED: CRASHED}
    return Status(words.get(str(event.get("exit")), CRASHED), event["text"])


def _line_of_start(event: Event | None) -> str:
    if event is None:
        return "a process holds the folder"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
    return f"since {when}"


def code_of(events: Sequence[Event]) -> str:
    """Returns the digest of the code with which the last process of a run began; "": unknown."""
    for event in reversed(events):
        if event["kind"] in ("start", "resume"):
            versions = event.get("versions")
            return str(versions.get("code", "")) if isinstance(versions, dict) else ""
    return ""
