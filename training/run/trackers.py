"""Sends a run's metrics to console, metrics.jsonl, TensorBoard and Weights & Biases.

Invariant: metrics.jsonl holds whole lines only, one JSON object per logged step, in the order of
the steps, also after a crash and a resume; a new run keeps what it finds there as
metrics.jsonl.old; and a tracker that fails (disk full, no network) costs its own records, never
the run.

A tracker is a class with `log(data, step)` and `close()`, and a line in `Tracking._open`.
"""

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from training.run.files import naming, write_atomically

logger = logging.getLogger(__name__)

# How metrics.jsonl writes numbers that JSON has no form for.
NOT_FINITE = ("nan", "inf", "-inf")
# What the console's line of a step shows, in this order: label -> metric, format.
CONSOLE_COLUMNS = {
    "reward": ("critic/score/mean", "7.4f"),
    "length": ("response_length/mean", "7.1f"),
    "entropy": ("actor/entropy", "6.3f"),
    "kl": ("actor/ppo_kl", "9.2e"),
    "clip": ("actor/pg_clipfrac", "6.4f"),
    "grad": ("actor/grad_norm", "7.3f"),
    "vf_loss": ("critic/vf_loss", "7.4f"),
    "tok/s": ("perf/throughput", "7.0f"),
    "s/step": ("perf/time_per_step", "6.1f"),
}
# What it shows only where something is amiss: label -> count, of how many.
CONSOLE_COUNTS = {
    "failed": ("agent/failed", "agent/episodes"),
    "masked": ("agent/masked", "agent/episodes"),
    "overflow": ("agent/ending/overflow", "agent/episodes"),
    "retries": ("agent/retries", None),
    "cut turns": ("agent/cut_turns", None),
}
# The metrics that stand beside a mean reward of validation, below its name.
ABOUT_THE_MEAN = ("/ci_low", "/ci_high", "/tasks")


class Tracker(Protocol):
    """Takes a step's metrics to one destination."""

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Records one step."""

    def close(self) -> None:
        """Ends the record."""


class Tracking(AbstractContextManager["Tracking"]):
    """Sends each step's metrics to all chosen trackers; a context manager.

    Args:
        project_name, experiment_name: names under which wandb files the run.
        default_backend: one or several of console, file, tensorboard, wandb (verl's argument name).
        config: the run's resolved configuration, recorded by wandb.
        local_dir: folder of metrics.jsonl and tensorboard/.
        resume_step: the last step of the checkpoint that the run continues from; later records are
            cut. 0: a new run, before which an old metrics.jsonl becomes metrics.jsonl.old, in the
            place of an older one.
        total_steps: of the whole run, for the console's progress.
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
        total_steps: int | None = None,
    ) -> None:
        self.project_name = project_name
        self.experiment_name = experiment_name
        self.config = config
        self.folder = Path(local_dir)
        self.resume_step = resume_step
        self.total_steps = total_steps
        self._warned: set[str] = set()
        self._trackers: dict[str, Tracker] = {}
        if isinstance(default_backend, str):
            default_backend = [default_backend]
        for name in default_backend:
            try:
                self._trackers[name] = self._open(name)
            except Exception as error:
                self._warn(name, error)

    def _open(self, name: str) -> Tracker:
        if name == "console":
            return ConsoleTracker(self.resume_step, self.total_steps)
        if name == "file":
            return FileTracker(self.folder / "metrics.jsonl", self.resume_step)
        if name == "tensorboard":
            return TensorBoardTracker(self.folder / "tensorboard", self.resume_step)
        if name == "wandb":
            return WandbTracker(self.project_name, self.experiment_name, self.config, self.folder)
        raise KeyError(name)

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Records one step; values are numbers or 0-dim arrays and tensors."""
        numbers = {key: float(value) for key, value in data.items()}
        for name, tracker in self._trackers.items():
            try:
                tracker.log(numbers, step)
            except Exception as error:
                self._warn(name, error)

    def close(self) -> None:
        """Closes all trackers; a second call does nothing."""
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:
                self._warn(name, error)
        self._trackers = {}

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _warn(self, name: str, error: Exception) -> None:
        if name not in self._warned:
            logger.warning(
                "tracker %s failed, the run goes on without its records: %s: %s",
                name,
                type(error).__name__,
                error,
            )
        self._warned.add(name)


def open_trackers(config: Any, run_dir: Path, resume_step: int, total_steps: int) -> Tracking:
    """Opens the trackers that a run's config names.

    A validation alone gets the console: it must not cut the run's files back.
    """
    trainer = config.trainer
    return Tracking(
        trainer.project_name,
        trainer.experiment_name,
        ["console"] if trainer.val_only else list(trainer.trackers),
        config=asdict(config),
        local_dir=run_dir,
        resume_step=resume_step,
        total_steps=total_steps,
    )


class ConsoleTracker:
    """Prints a line per step, its columns aligned.

    As in `step   3/60 | reward  0.4219 | … | left 0:01:12`.
    """

    def __init__(self, first_step: int, total_steps: int | None) -> None:
        self.first_step = first_step
        self.total_steps = total_steps
        self.start = time.monotonic()

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Prints the step's line, and how long the rest of the run will take."""
        line = format_line(data, step, self.total_steps)
        if self.total_steps and self.first_step < step < self.total_steps:
            seconds_per_step = (time.monotonic() - self.start) / (step - self.first_step)
            seconds_left = round(seconds_per_step * (self.total_steps - step))
            line += f" | left {timedelta(seconds=seconds_left)}"
        print(line, flush=True)

    def close(self) -> None:
        """Ends nothing: the console stays."""


def format_line(data: Mapping[str, float], step: int, total_steps: int | None = None) -> str:
    """Formats the console's line of a step.

    The columns that the step has come first, then what was amiss, then its validation rewards.
    """
    cells = [f"step {step:5d}"]
    if total_steps:
        cells[0] += f"/{total_steps}"
    for label, (key, number_format) in CONSOLE_COLUMNS.items():
        if key in data:
            cells.append(f"{label} {data[key]:{number_format}}")
    for label, (key, whole) in CONSOLE_COUNTS.items():
        if data.get(key):
            cell = f"{label} {data[key]:.0f}"
            if whole is not None:
                cell += f" of {data[whole]:.0f}"
            cells.append(cell)
    cells += [format_validation(key, data) for key in data if is_validation_reward(key)]
    return " | ".join(cells)


def is_validation_reward(key: str) -> bool:
    """Tells a reward of validation from its interval and its number of tasks."""
    return key.startswith("val-core/") and not key.endswith(ABOUT_THE_MEAN)


def format_validation(key: str, data: Mapping[str, float]) -> str:
    """Formats a reward of validation, with its interval where it has one."""
    cell = f"{key.removeprefix('val-core/')} {data[key]:.4f}"
    if f"{key}/ci_low" in data:
        cell += f" [{data[f'{key}/ci_low']:.3f}, {data[f'{key}/ci_high']:.3f}]"
    return cell


class FileTracker:
    """Appends {"step": n, metric: value, …} to a .jsonl file, on the disk when `log` returns.

    NaN and infinities are the strings "nan", "inf" and "-inf", which JSON has no numbers for and
    float() reads.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # An empty file does not take the place of an older one.
        if path.exists() and path.stat().st_size > 0:
            if resume_step > 0:
                cut_back(path, resume_step)
            else:
                path.replace(path.with_name(path.name + ".old"))
        self.path = path
        # Unbuffered: what cannot be written is taken back, and does not come later.
        self.file = path.open("ab", buffering=0)

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Writes the step's line and forces it to disk; a line without room leaves nothing."""
        record: dict[str, float | str] = {"step": step}
        for key, value in data.items():
            record[key] = value if math.isfinite(value) else str(value)
        line = (json.dumps(record) + "\n").encode()
        before = self.file.seek(0, os.SEEK_END)
        try:
            with naming(self.path):
                while line:
                    line = line[self.file.write(line) :]
                os.fsync(self.file.fileno())
        except OSError:
            self.file.truncate(before)
            raise

    def close(self) -> None:
        """Closes the file."""
        self.file.close()


def cut_back(path: Path, resume_step: int) -> None:
    """Drops a metrics file's lines after `resume_step`, and damaged ones, in one rename."""
    lines = []
    for record in read_records(path):
        if record["step"] <= resume_step:
            lines.append(json.dumps(record) + "\n")
    write_atomically(path, "".join(lines))


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the steps of a metrics file; a line that holds none, or part of one, is said."""
    text = path.read_text(encoding="utf-8", errors="replace")
    # Not splitlines, which counts characters within a line, too.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield _read_record(line)
        except (ValueError, RecursionError) as error:
            logger.warning("%s, line %d, is damaged and left out: %s", path, number, error)


def _read_record(line: str) -> dict[str, Any]:
    """Reads a line of a metrics file.

    Raises:
        ValueError: it is not JSON, has no step, or values other than numbers.
    """
    record = json.loads(line)
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        raise ValueError('it has no "step", which is a whole number')
    wrong = [key for key, value in record.items() if not _is_number(value)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is no number")
    return record


def _is_number(value: object) -> bool:
    """Checks whether a value is a number, or names one that is not finite."""
    return type(value) in (int, float) or value in NOT_FINITE


class TensorBoardTracker:
    """Writes scalars for TensorBoard; a resumed run hides what came after its checkpoint."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = resume_step + 1 if resume_step else 0
        self.writer = SummaryWriter(str(folder), purge_step=purge_step)

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Writes one scalar a metric."""
        for key, value in data.items():
            self.writer.add_scalar(key, value, step)
        self.writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self.writer.close()


class WandbTracker:
    """Logs to Weights & Biases.

    Written against its documented API and not tested here, where there is no network.
    """

    def __init__(
        self, project_name: str, experiment_name: str, config: dict[str, Any], folder: Path
    ) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=project_name, name=experiment_name, config=config, dir=str(folder)
        )

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Logs the metrics of a step."""
        self.run.log(dict(data), step=step)

    def close(self) -> None:
        """Ends the run at wandb."""
        self.run.finish()
