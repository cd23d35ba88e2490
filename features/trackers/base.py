"""Opens a run's trackers and sends each step to all of them.

Invariant: a tracker that fails (its package, a full disk, no network) costs its own records, never
the run, and is said once.

A further tracker is a class as `interface.Tracker` has it and a line in `Tracking._open`; one of a
package with a network is a class in a file here and a line in `child.RUNS`.
"""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from features.trackers.exchange import PACKAGES, TrackerSettings
from features.trackers.file import FileTracker
from features.trackers.interface import Generations, Tracker
from features.trackers.json_lines import JsonTracker
from features.trackers.process import ProcessTracker
from features.trackers.run_ids import RunIds
from features.trackers.tensorboard import TensorBoardTracker
from training.run.metrics_file import METRICS_FILE

logger = logging.getLogger(__name__)
DEFAULT_TIMEOUT_S = 120.0


class Tracking(AbstractContextManager["Tracking"]):
    """Sends each step's metrics to all chosen trackers; a context manager.

    Args:
        project_name, experiment_name: names under which trackers file the run.
        default_backend: one or several of json, file, tensorboard, wandb, mlflow, swanlab,
            trackio, clearml (verl's argument name).
        config: the run's resolved configuration, recorded by trackers that show one.
        local_dir: the run's folder.
        resume_step: the last step of the checkpoint that the run continues from; later records are
            cut. 0: a new run, before which an old metrics.jsonl becomes metrics.jsonl.old, in the
            place of an older one.
        timeout_s: after which a tracker that does not answer is ended.
        python: the Python that has the packages of trackers; None: this one.
        goes_back: the run returns to a step of its past on purpose; see `RunIds`.
    What goes wrong is logged, once per backend.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | list[str],
        config: dict[str, Any],
        local_dir: str | Path,
        resume_step: int = 0,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        python: str | None = None,
        goes_back: bool = False,
    ) -> None:
        self.folder = Path(local_dir)
        self.resume_step = resume_step
        self.timeout_s = timeout_s
        self.python = python
        self.settings = TrackerSettings(
            project=project_name,
            experiment=experiment_name,
            config=config,
            folder=str(self.folder.absolute()),
        )
        self.run_ids = RunIds(self.folder, resume_step, goes_back=goes_back)
        self._warned: set[str] = set()
        self._trackers: dict[str, Tracker] = {}
        names = [default_backend] if isinstance(default_backend, str) else default_backend
        for name in dict.fromkeys(names):
            try:
                self._trackers[name] = self._open(name)
            except Exception as error:
                self._warn(name, error)

    def _open(self, name: str) -> Tracker:
        if name == "json":
            return JsonTracker()
        if name == "file":
            return FileTracker(self.folder / METRICS_FILE, self.resume_step)
        if name == "tensorboard":
            return TensorBoardTracker(self.folder / "tensorboard", self.resume_step)
        if name in PACKAGES:
            return ProcessTracker(
                name,
                self.settings,
                self.run_ids,
                timeout_s=self.timeout_s,
                python=self.python,
                warn=self._warn,
            )
        raise KeyError(name)

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Records one step; values are numbers or 0-dim arrays and tensors."""
        numbers = {key: float(value) for key, value in data.items()}
        for name, tracker in self._trackers.items():
            try:
                tracker.log(numbers, step)
            except Exception as error:
                self._warn(name, error)

    def log_generations(self, rows: Generations, step: int) -> None:
        """Records some of validation's answers, before the step's metrics.

        Args:
            rows: each with `input`, `output` (text) and `score` (a number); none: does nothing.
        """
        if not rows:
            return
        for name, tracker in self._trackers.items():
            try:
                tracker.log_generations(rows, step)
            except Exception as error:
                self._warn(name, error)

    def close(self, *, failed: bool = False) -> None:
        """Closes all trackers, those with a process side by side; a second call does nothing."""
        for tracker in self._trackers.values():
            if isinstance(tracker, ProcessTracker):
                tracker.begin_close(failed=failed)
        for name, tracker in self._trackers.items():
            try:
                tracker.close(failed=failed)
            except Exception as error:
                self._warn(name, error)
        self._trackers = {}

    def __exit__(self, kind: object, *raised: object) -> None:
        self.close(failed=kind is not None)

    def _warn(self, name: str, error: Exception) -> None:
        if name not in self._warned:
            logger.warning(
                "tracker %s failed, the run goes on without its records: %s: %s",
                name,
                type(error).__name__,
                error,
            )
        self._warned.add(name)
