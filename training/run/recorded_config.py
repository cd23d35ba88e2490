"""Records a run's settings in its folder, and those of earlier steps where a resume changed them.

Invariant: config.yaml is of the steps that come, config.N.yaml of those that its first line names.
"""

import logging
import re
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from training.config import PPOConfig
from training.config.plain_files import load_plain_yaml, read_plain_text
from training.config.reference import to_yaml
from training.features import moved_keys, renamed
from training.run.files import write_atomically

logger = logging.getLogger(__name__)
# Settings that say how a run is resumed, not how it trains.
RESUME_SETTINGS = (
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "trainer.resume_with_changes",
)


# The changes of a resume: key -> (before, after).
Changes = dict[str, tuple[Any, Any]]


def record_config(run_dir: Path, config: PPOConfig, step: int) -> Changes:
    """Writes config.yaml; returns the settings that differ from those of the steps before.

    A run that goes on from `step` with other settings says which, and keeps those before: they
    become config.N.yaml, whose first line names their steps. A validation alone leaves config.yaml
    as it is.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "config.yaml"
    text = to_yaml(config)
    if config.trainer.val_only and path.exists():
        write_atomically(run_dir / "config.validation.yaml", text)
        return {}
    changes: Changes = {}
    earlier = [file for file in run_dir.glob("config.*.yaml") if file.suffixes[0][1:].isdigit()]
    if step == 0:
        for file in earlier:
            file.unlink()
    elif path.exists():
        before = read_plain_text(path, errors="replace")
        changes = _changes(path, before, text)
        if changes:
            kept = run_dir / f"config.{len(earlier) + 1}.yaml"
            first = _last_recorded_step(earlier) + 1
            write_atomically(kept, f"# steps {first} to {step}\n{before}")
            logger.warning(
                "the run goes on from step %s with other settings (those before: %s):\n  %s",
                step,
                kept.name,
                "\n  ".join(f"{key}: {old} -> {new}" for key, (old, new) in changes.items()),
            )
    write_atomically(path, text)
    return changes


def settings_of_step(run_dir: Path, step: int | None) -> dict[str, Any] | None:
    """Reads the settings that a step of a run was made with, nested as in config.yaml.

    Args:
        step: None: the run's last ones.
    Returns:
        None where the folder holds none that can be read.
    """
    file = run_dir / "config.yaml"
    for earlier in run_dir.glob("config.*.yaml"):
        steps = _recorded_steps(earlier)
        if step is not None and step in steps:
            file = earlier
    try:
        settings = load_plain_yaml(read_plain_text(file, errors="replace"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return None
    return settings if isinstance(settings, dict) else None


def _recorded_steps(file: Path) -> range:
    """Reads the steps that earlier settings' first line names; none where it names none."""
    try:
        text = read_plain_text(file, errors="replace")
    except OSError:
        return range(0)
    header = re.match(r"# steps (\d{1,9}) to (\d{1,9})", text)
    return range(int(header[1]), int(header[2]) + 1) if header else range(0)


def _last_recorded_step(files: list[Path]) -> int:
    """Reads the last step that earlier settings' first lines name; 0 where none does."""
    last = 0
    for file in files:
        last = max([last, *_recorded_steps(file)[-1:]])
    return last


def _changes(path: Path, before: str, after: str) -> Changes:
    """Returns the settings that differ between a file's text and another.

    A file that cannot be read is said, and has no settings.
    """
    new = flat_settings(after)
    try:
        old = flat_settings(before)
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        logger.warning(
            "%s cannot be read (%s), so that nothing tells with which settings the steps before "
            "were made; it is written anew",
            path,
            reason,
        )
        return {}
    # A setting that did not exist then had no other value than its default.
    old = {**flat_settings(to_yaml(PPOConfig())), **old}
    changes = {}
    for key in {**old, **new}:
        if key not in RESUME_SETTINGS and old.get(key) != new.get(key):
            changes[key] = (old.get(key), new.get(key))
    return changes


def flat_settings(text: str) -> dict[str, Any]:
    """Reads a YAML file's settings by dotted key; older keys are called as they are now.

    Raises:
        YAMLError, ValueError: it is not YAML, or holds no settings.
    """
    settings = load_plain_yaml(text)
    if not isinstance(settings, dict):
        raise ValueError("it is empty" if settings is None else "it holds no settings")
    flat = pd.json_normalize(settings).iloc[0].to_dict()
    moved = moved_keys()
    named = {}
    for key, value in flat.items():
        # A damaged file may have numbers for keys.
        name = str(key)
        named[renamed(name, moved) or name] = value
    return named
