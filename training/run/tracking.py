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
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from training.run.records import write_atomically

logger = logging.getLogger(__name__)

# The console's columns and counts.
CONSOLE: dict[str, dict[str, list[Any]]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))


# What takes a step's metrics to one destination, and what closes that.
Log = Callable[[Mapping[str, float], int], None]
Tracker = tuple[Log, Callable[[], object]]


class Tracking(AbstractContextManager["Tracking"]):
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
            "console": lambda: (console_log(resume_step, total_steps), lambda: None),
            "file": lambda: open_file(folder / "metrics.jsonl", resume_step),
            "tensorboard": lambda: open_tensorboard(folder / "tensorboard", config, resume_step),
            "wandb": lambda: open_wandb(project_name, experiment_name, config, folder),
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
        self._tell(lambda log, _: log(numbers, step))

    def close(self) -> None:
        """Closes all trackers; a second call does nothing."""
        self._tell(lambda _, close: close())
        self._trackers = {}

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _tell(self, call: Callable[[Log, Callable[[], object]], object]) -> None:
        for name, tracker in self._trackers.items():
            try:
                call(*tracker)
            except Exception as error:
                self._warn(name, error)

    def _warn(self, name: str, error: Exception) -> None:
        if name not in self._warned:
            logger.warning("tracker %s failed, the run goes on without its records: %r", name, error)
        self._warned.add(name)


def console_log(first_step: int, total_steps: int | None) -> Log:
    """Prints a line per step, its columns aligned: `step   3/60 | reward  0.4219 | … | left 0:01:12`."""
    start = time.monotonic()

    def log(data: Mapping[str, float], step: int) -> None:
        line = format_line(data, step, total_steps)
        if total_steps and first_step < step < total_steps:
            per_step = (time.monotonic() - start) / (step - first_step)
            line += f" | left {timedelta(seconds=round(per_step * (total_steps - step)))}"
        print(line, flush=True)

    return log


def format_line(data: Mapping[str, float], step: int, total_steps: int | None = None) -> str:
    """Formats the console's line: the columns that the step has, what was amiss, then its validation rewards."""
    cells = [f"{label} {data[key]:{spec}}" for label, (key, spec) in CONSOLE["columns"].items() if key in data]
    for label, (key, whole) in CONSOLE["counts"].items():
        if data.get(key):
            cells.append(f"{label} {data[key]:.0f}" + (f" of {data[whole]:.0f}" if whole else ""))
    cells += [f"{key.removeprefix('val-core/')} {data[key]:.4f}" for key in data if key.startswith("val-core/")]
    return " | ".join([f"step {step:5d}" + (f"/{total_steps}" if total_steps else ""), *cells])


def open_file(path: Path, resume_step: int) -> Tracker:
    """Appends {"step": n, metric: value, …} to a .jsonl file, on the disk when `log` returns.

    NaN and infinities are the strings "nan", "inf" and "-inf", which JSON has no numbers for and float() reads.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # An empty file does not take the place of an older one.
    if path.exists() and path.stat().st_size > 0:
        if resume_step > 0:
            cut_back(path, resume_step)
        else:
            path.replace(path.with_name(path.name + ".old"))
    file = path.open("a", encoding="utf-8")

    def log(data: Mapping[str, float], step: int) -> None:
        values = {key: value if math.isfinite(value) else str(value) for key, value in data.items()}
        file.write(json.dumps({"step": step, **values}) + "\n")
        file.flush()
        os.fsync(file.fileno())

    return log, file.close


def cut_back(path: Path, resume_step: int) -> None:
    """Drops the lines after `resume_step`, and those only partly written, from a metrics file, in one rename."""
    kept = [json.dumps(record) + "\n" for record in read_records(path) if record["step"] <= resume_step]
    write_atomically(path, "".join(kept))


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the steps of a metrics file, without the lines that are only partly written."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and "step" in record:
                yield record


def open_tensorboard(folder: Path, config: dict[str, Any], resume_step: int) -> Tracker:
    """Writes scalars for TensorBoard; on resuming, it hides what was recorded after the checkpoint."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step else 0)
    writer.add_text("config", f"```json\n{json.dumps(config, indent=2, default=str)}\n```", global_step=resume_step)

    def log(data: Mapping[str, float], step: int) -> None:
        for key, value in data.items():
            writer.add_scalar(key, value, step)
        writer.flush()

    return log, writer.close


def open_wandb(project_name: str, experiment_name: str, config: dict[str, Any], folder: Path) -> Tracker:
    """Logs to Weights & Biases; written against its documented API and not tested here, where there is no network."""
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(project=project_name, name=experiment_name, config=config, dir=str(folder))
    return lambda data, step: run.log(dict(data), step=step), run.finish
