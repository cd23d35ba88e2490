"""Keeps which run of each tracker is this run's, and the last step that each was sent.

RUN_DIR/trackers.json: {"wandb": {"run_id": "…", "last_step": 12}, …}. Invariant: a step is noted
before it is sent, so that none is sent twice, whatever dies in between.
"""

import json
import logging
import threading
from pathlib import Path
from typing import Any

from training.run.files import write_atomically

logger = logging.getLogger(__name__)
FILE = "trackers.json"


class RunIds:
    """Reads and writes trackers.json; it may be called from several threads.

    A resumed run goes on with the trackers' runs that it has had; those steps of which they have a
    record already, since the run got further before it ended than its checkpoint, are not sent
    again. A new run has new ones, and so has one that goes back on purpose
    (`trainer.resume_mode=resume_path`) behind steps that a tracker has: what it does then is not
    what was recorded.

    Args:
        folder: the run's.
        resume_step: 0: a new run, for which the file is begun anew.
        goes_back: the run was told which checkpoint it continues from.
    """

    def __init__(self, folder: Path, resume_step: int, *, goes_back: bool = False) -> None:
        self.path = folder / FILE
        self._lock = threading.Lock()
        self._entries: dict[str, dict[str, Any]] = {}
        if resume_step <= 0:
            return
        for name, entry in _read_entries(self.path).items():
            if not (goes_back and entry["last_step"] > resume_step):
                self._entries[name] = entry

    def run_id(self, name: str) -> str | None:
        """Returns the id of a tracker's run; None: it has none yet."""
        entry = self._entries.get(name)
        return entry["run_id"] if entry else None

    def last_step(self, name: str) -> int:
        """Returns the last step that a tracker was sent; -1: none."""
        entry = self._entries.get(name)
        return entry["last_step"] if entry else -1

    def opened(self, name: str, run_id: str) -> None:
        """Notes a tracker's run; another than before has no step yet."""
        if run_id != self.run_id(name):
            self._write(name, run_id, -1)

    def sends(self, name: str, step: int) -> None:
        """Notes that a step is about to be sent.

        Raises:
            OSError: it could not be written; the step may be sent all the same.
        """
        run_id = self.run_id(name)
        assert run_id is not None, "a tracker is opened before it is sent anything"
        self._write(name, run_id, step)

    def _write(self, name: str, run_id: str, last_step: int) -> None:
        with self._lock:
            self._entries[name] = {"run_id": run_id, "last_step": last_step}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(self._entries, indent=1) + "\n")


def _read_entries(path: Path) -> dict[str, dict[str, Any]]:
    """Reads the file; one that is damaged, or not there, has no entries."""
    try:
        entries = json.loads(path.read_text())
        return {
            str(name): {"run_id": str(entry["run_id"]), "last_step": int(entry["last_step"])}
            for name, entry in entries.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("%s is damaged, the trackers' runs begin anew: %s", path, error)
        return {}
