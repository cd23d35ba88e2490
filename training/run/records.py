"""What a run's folder says of itself: who holds it, and with which settings each of its steps was made.

Invariant: one process at a time trains into a folder; config.yaml is of the steps that come, config.N.yaml of those
that its first line names.
"""

import fcntl
import json
import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from data.texts import say
from training.config import PPOConfig
from training.config.loader import ConfigError
from training.config.values import to_yaml

logger = logging.getLogger(__name__)
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
            raise ConfigError([say("folder_held", run_dir=run_dir, holder=file.read() or "another process")]) from None
        except OSError as error:
            logger.warning("%s cannot be locked, so nothing keeps a second run out: %s", run_dir, error)
        else:
            if before := file.read():
                logger.warning("%s: the run of %s did not come to its end; its folder is taken over", run_dir, before)
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
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
    old, new = (dict(_flat(yaml.safe_load(text))) for text in (before, after))
    keys = [key for key in {**old, **new} if key not in OF_THE_RESUME]
    return [f"{key}: {old.get(key)} -> {new.get(key)}" for key in keys if old.get(key) != new.get(key)]


def _flat(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        yield from _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
