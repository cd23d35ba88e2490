"""Where metrics go: console, metrics.jsonl, TensorBoard, Weights & Biases.

Invariant: metrics.jsonl holds whole lines only, one JSON object per logged step, in the order of the steps, also after
a crash and a resume; a new run keeps what it finds there as metrics.jsonl.old; and a tracker that fails (disk full, no
network) costs its own records, never the run.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, Self

from training.run.records import write_atomically

logger = logging.getLogger(__name__)

# (label, metric, format): what one looks at while a run goes on.
CONSOLE_COLUMNS = (
    ("reward", "critic/score/mean", "7.4f"),
    ("length", "response_length/mean", "7.1f"),
    ("entropy", "actor/entropy", "6.3f"),
    ("kl", "actor/ppo_kl", "9.2e"),
    ("clip", "actor/pg_clipfrac", "6.4f"),
    ("grad", "actor/grad_norm", "7.3f"),
    ("vf_loss", "critic/vf_loss", "7.4f"),
    ("tok/s", "perf/throughput", "7.0f"),
    ("s/step", "perf/time_per_step", "6.1f"),
)


# What a step has only where something is amiss: (label, count, of how many).
CONSOLE_COUNTS = (
    ("failed", "agent/failed", "agent/episodes"),
    ("masked", "agent/masked", "agent/episodes"),
    ("overflow", "agent/ending/overflow", "agent/episodes"),
    ("retries", "agent/retries", None),
    ("cut turns", "agent/cut_turns", None),
)


class Tracker(Protocol):
    """Takes metrics to one destination."""

    def log(self, data: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Tracking:
    """Sends each step's metrics to all chosen trackers; a context manager.

    Args:
        project_name, experiment_name: names under which wandb files the run.
        default_backend: one or several of console, file, tensorboard, wandb (verl's argument name).
        config: the run's resolved configuration, recorded by tensorboard and wandb.
        local_dir: folder of metrics.jsonl and tensorboard/.
        resume_step: the last step of the checkpoint that the run continues from; later records are cut. 0: a new run,
            before which an old metrics.jsonl becomes metrics.jsonl.old, in the place of an older one.
        total_steps: of the whole run, for the console's progress.
    Raises ValueError for an unknown backend, ImportError for one whose package is missing. What goes wrong later is
    logged, once per backend.
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
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        folder = Path(local_dir)
        openers: dict[str, Callable[[], Tracker]] = {
            "console": lambda: ConsoleTracker(resume_step, total_steps),
            "file": lambda: FileTracker(folder / "metrics.jsonl", resume_step),
            "tensorboard": lambda: TensorboardTracker(folder / "tensorboard", config, resume_step),
            "wandb": lambda: WandbTracker(project_name, experiment_name, config, folder),
        }
        if unknown := [name for name in names if name not in openers]:
            raise ValueError(f"trainer.logger has {unknown}; allowed: {', '.join(openers)}")
        self._warned: set[str] = set()
        self._trackers: dict[str, Tracker] = {}
        for name in names:
            try:
                self._trackers[name] = openers[name]()
            except ImportError as error:
                raise ImportError(f"trainer.logger={name} lacks its package: pip install {name}") from error
            except Exception as error:
                self._warn(name, error)

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Records one step; values are numbers or 0-dim arrays and tensors."""
        numbers = {key: float(value) for key, value in data.items()}
        self._tell(lambda tracker: tracker.log(numbers, step))

    def close(self) -> None:
        """Closes all trackers; a second call does nothing."""
        self._tell(lambda tracker: tracker.close())
        self._trackers = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in self._trackers.items():
            try:
                call(tracker)
            except Exception as error:
                self._warn(name, error)

    def _warn(self, name: str, error: Exception) -> None:
        if name not in self._warned:
            logger.warning("tracker %s failed, the run goes on without its records: %r", name, error)
        self._warned.add(name)


class ConsoleTracker:
    """Prints a line per step, its columns aligned: `step   3/60 | reward  0.4219 | … | left 0:01:12`."""

    def __init__(self, first_step: int, total_steps: int | None) -> None:
        self.first_step, self.total_steps, self.start = first_step, total_steps, time.monotonic()

    def log(self, data: Mapping[str, float], step: int) -> None:
        line = format_line(data, step, self.total_steps)
        if self.total_steps and self.first_step < step < self.total_steps:
            per_step = (time.monotonic() - self.start) / (step - self.first_step)
            line += f" | left {timedelta(seconds=round(per_step * (self.total_steps - step)))}"
        print(line, flush=True)

    def close(self) -> None:
        pass


def format_line(data: Mapping[str, float], step: int, total_steps: int | None = None) -> str:
    """Formats the console's line: the columns that the step has, what was amiss, then its validation rewards."""
    cells = [f"{label} {data[key]:{spec}}" for label, key, spec in CONSOLE_COLUMNS if key in data]
    for label, key, whole in CONSOLE_COUNTS:
        if data.get(key):
            cells.append(f"{label} {data[key]:.0f}" + (f" of {data[whole]:.0f}" if whole else ""))
    cells += [
        f"{key.removeprefix('val-core/')} {value:.4f}" for key, value in data.items() if key.startswith("val-core/")
    ]
    return " | ".join([f"step {step:5d}" + (f"/{total_steps}" if total_steps else ""), *cells])


class FileTracker:
    """Appends {"step": n, metric: value, …} to a .jsonl file, on the disk when `log` returns.

    NaN and infinities are the strings "nan", "inf" and "-inf", which JSON has no numbers for and float() reads.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # An empty file does not take the place of an older one.
        if path.exists() and path.stat().st_size > 0:
            if resume_step > 0:
                cut_back(path, resume_step)
            else:
                path.replace(path.with_name(path.name + ".old"))
        self._file = path.open("a", encoding="utf-8")

    def log(self, data: Mapping[str, float], step: int) -> None:
        values = {key: value if math.isfinite(value) else str(value) for key, value in data.items()}
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def cut_back(path: Path, resume_step: int) -> None:
    """Drops the lines after `resume_step`, and those only partly written, from a metrics file, in one rename."""
    kept = [json.dumps(record) + "\n" for record in read_records(path) if record["step"] <= resume_step]
    write_atomically(path, "".join(kept))


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the steps of a metrics file, without the lines that are only partly written."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "step" in record:
            yield record


class TensorboardTracker:
    """Writes scalars for TensorBoard; on resuming, it hides what was recorded after the checkpoint."""

    def __init__(self, folder: Path, config: dict[str, Any], resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step else 0)
        text = json.dumps(config, indent=2, default=str)
        self._writer.add_text("config", f"```json\n{text}\n```", global_step=resume_step)

    def log(self, data: Mapping[str, float], step: int) -> None:
        for key, value in data.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Logs to Weights & Biases; written against its documented API and not tested here, where there is no network."""

    def __init__(self, project_name: str, experiment_name: str, config: dict[str, Any], folder: Path) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(project=project_name, name=experiment_name, config=config, dir=str(folder))

    def log(self, data: Mapping[str, float], step: int) -> None:
        self._run.log(dict(data), step=step)

    def close(self) -> None:
        self._run.finish()
