"""What a run leaves behind: its metrics (console, metrics.jsonl, TensorBoard, Weights & Biases) and its settings.

Invariant: one process at a time trains into a folder. metrics.jsonl holds whole lines only, one JSON object per logged
step, in the order of the steps, also after a crash and a resume; a new run keeps what it finds there as
metrics.jsonl.old; and a tracker that fails (disk full, no network) costs its own records, never the run. config.yaml is
of the steps that come, config.N.yaml of those that its first line names.
"""

import fcntl
import json
import logging
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from data.texts import say, table
from training.config import PPOConfig
from training.config.loader import ConfigError, to_yaml

logger = logging.getLogger(__name__)

# The console's columns and counts.
CONSOLE: dict[str, dict[str, list[Any]]] = table(__file__)


# What takes a step's metrics to one destination, and what closes that.
Log = Callable[[Mapping[str, float], int], None]
Tracker = tuple[Log, Callable[[], object]]


class Tracking(AbstractContextManager["Tracking"]):
    """Sends each step's metrics to all chosen trackers; a context manager.

    Args:
        project_name, experiment_name: names under which wandb files the run.
        default_backend: one or several of console, file, tensorboard, wandb (verl's argument name).
        config: the run's resolved configuration, recorded by wandb.
        local_dir: folder of metrics.jsonl and tensorboard/.
        resume_step: the last step of the checkpoint that the run continues from; later records are cut. 0: a new run,
            before which an old metrics.jsonl becomes metrics.jsonl.old, in the place of an older one.
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
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        folder = Path(local_dir)
        openers: dict[str, Callable[[], Tracker]] = {
            "console": lambda: (console_log(resume_step, total_steps), lambda: None),
            "file": lambda: open_file(folder / "metrics.jsonl", resume_step),
            "tensorboard": lambda: open_tensorboard(folder / "tensorboard", resume_step),
            "wandb": lambda: open_wandb(project_name, experiment_name, config, folder),
        }
        self._warned: set[str] = set()
        self._trackers: dict[str, Tracker] = {}
        for name in names:
            try:
                self._trackers[name] = openers[name]()
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
            logger.warning(
                "tracker %s failed, the run goes on without its records: %r", name, error
            )
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
    cells = [
        f"{label} {data[key]:{spec}}"
        for label, (key, spec) in CONSOLE["columns"].items()
        if key in data
    ]
    for label, (key, whole) in CONSOLE["counts"].items():
        if data.get(key):
            cells.append(f"{label} {data[key]:.0f}" + (f" of {data[whole]:.0f}" if whole else ""))
    cells += [
        f"{key.removeprefix('val-core/')} {data[key]:.4f}"
        for key in data
        if key.startswith("val-core/")
    ]
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
    kept = [
        json.dumps(record) + "\n" for record in read_records(path) if record["step"] <= resume_step
    ]
    write_atomically(path, "".join(kept))


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the steps of a metrics file, without the lines that are only partly written."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and "step" in record:
                yield record


def open_tensorboard(folder: Path, resume_step: int) -> Tracker:
    """Writes scalars for TensorBoard; on resuming, it hides what was recorded after the checkpoint."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step else 0)

    def log(data: Mapping[str, float], step: int) -> None:
        for key, value in data.items():
            writer.add_scalar(key, value, step)
        writer.flush()

    return log, writer.close


def open_wandb(
    project_name: str, experiment_name: str, config: dict[str, Any], folder: Path
) -> Tracker:
    """Logs to Weights & Biases; written against its documented API and not tested here, where there is no network."""
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(project=project_name, name=experiment_name, config=config, dir=str(folder))
    return lambda data, step: run.log(dict(data), step=step), run.finish


# Settings that say how a run is resumed, not how it trains.
OF_THE_RESUME = ("trainer.resume_mode", "trainer.resume_from_path", "trainer.resume_with_changes")


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Keeps the folder for this process; the system takes the lock from a holder that ends, however it does.

    Raises: ConfigError where another process holds it, with its process id and host.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "owner.json").open("a+") as file:
        file.seek(0)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ConfigError(
                [say("folder_held", run_dir=run_dir, holder=file.read() or "another process")]
            ) from None
        except OSError as error:
            logger.warning(
                "%s cannot be locked, so nothing keeps a second run out: %s", run_dir, error
            )
        else:
            if before := file.read():
                logger.warning(
                    "%s: the run of %s did not come to its end; its folder is taken over",
                    run_dir,
                    before,
                )
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        # For other nodes of a shared file system, which look at it.
        os.fsync(file.fileno())
        try:
            yield
        finally:
            file.truncate(0)


def record_config(run_dir: Path, config: PPOConfig, step: int) -> None:
    """Writes config.yaml; a run that goes on from `step` with other settings says which, and keeps those before.

    They become config.N.yaml, whose first line names their steps. A validation alone leaves config.yaml as it is.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path, text = run_dir / "config.yaml", to_yaml(config)
    versions = [path for path in run_dir.glob("config.*.yaml") if path.suffixes[0][1:].isdigit()]
    if config.trainer.val_only and path.exists():
        path = run_dir / "config.validation.yaml"
    elif not step:
        for version in versions:
            version.unlink()
    elif path.exists() and (changed := _changes(path.read_text(), text)):
        ends = [re.match(r"# steps \d+ to (\d+)", version.read_text()) for version in versions]
        first = 1 + max((int(end[1]) for end in ends if end), default=0)
        kept = run_dir / f"config.{len(versions) + 1}.yaml"
        kept.write_text(f"# steps {first} to {step}\n{path.read_text()}")
        logger.warning(say("other_settings", step=step, kept=kept, changed="\n  ".join(changed)))
    path.write_text(text)


def write_atomically(path: Path, text: str) -> None:
    """Writes a file under a temporary name, forces it to disk, and renames it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    force_to_disk(temporary)
    temporary.replace(path)


def force_to_disk(written: Path) -> None:
    """Calls fsync on a file, or a folder and all below it, so that a rename cannot overtake the data."""
    for path in [written, *written.rglob("*")]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _changes(before: str, after: str) -> list[str]:
    """Lists the settings that differ between two files, as "key: old -> new"."""
    old, new = (
        pd.json_normalize(yaml.safe_load(text)).iloc[0].to_dict() for text in (before, after)
    )
    keys = [key for key in {**old, **new} if key not in OF_THE_RESUME]
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}" for key in keys if old.get(key) != new.get(key)
    ]
