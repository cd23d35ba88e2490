"""Records a run's settings in its folder, and those of earlier steps where a resume changed them.

Invariant: config.yaml is of the steps that come, config.N.yaml of those that its first line names.
"""

import logging
import re
from contextlib import suppress
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
# The first line of earlier settings.
HEADER = re.compile(r"# steps (\d{1,9}) to (\d{1,9})")

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
    earlier = _earlier_configs(run_dir)
    if step == 0:
        for file in earlier:
            file.unlink()
    elif path.exists():
        before = read_plain_text(path, errors="replace")
        changes = _changes(path, before, text)
        if changes:
            kept = run_dir / f"config.{len(earlier) + 1}.yaml"
            first = _last_step(earlier) + 1
            write_atomically(kept, f"# steps {first} to {step}\n{before}")
            logger.warning(
                "the run goes on from step %s with other settings (those before: %s):\n  %s",
                step,
                kept.name,
                "\n  ".join(f"{key}: {old} -> {new}" for key, (old, new) in changes.items()),
            )
        _give_up_steps_behind(earlier, step)
    write_atomically(path, text)
    return changes


def config_of_step(run_dir: Path, step: int | None) -> Path:
    """Returns the file of the settings that a step was made with; it may not be there.

    Args:
        step: None: the run's last one. A validation before the first step has step 0, and that
            step's settings.
    """
    file = run_dir / "config.yaml"
    if step is None:
        return file
    # Steps behind the one that a run went on from were made again, with later settings.
    for earlier in reversed(_earlier_configs(run_dir)):
        steps = _recorded_steps(earlier)
        if steps is None:
            continue
        if step > steps[1]:
            break
        file = earlier
    return file


def settings_of_step(run_dir: Path, step: int | None) -> dict[str, Any] | None:
    """Reads the settings that a step of a run was made with, nested as in config.yaml.

    Args:
        step: None: the run's last ones.
    Returns:
        None where the folder holds none that can be read.
    """
    file = config_of_step(run_dir, step)
    try:
        settings = load_plain_yaml(read_plain_text(file, errors="replace"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return None
    return settings if isinstance(settings, dict) else None


def changes_since(run_dir: Path, step: int, config: PPOConfig) -> Changes:
    """Returns the settings that differ from those that a step of a run was made with.

    A file that is not there, or cannot be read, tells of none.
    """
    path = config_of_step(run_dir, step)
    try:
        before = read_plain_text(path, errors="replace")
    except OSError:
        return {}
    return _changes(path, before, to_yaml(config))


def changes_before_step(run_dir: Path, step: int | None) -> dict[int, Changes]:
    """Returns what resumes had changed when a step was made, by the last step before each change.

    Files that cannot be read change nothing.
    """
    last = config_of_step(run_dir, step)
    last_steps = []
    settings = []
    for file in [*_earlier_configs(run_dir), run_dir / "config.yaml"]:
        steps = _recorded_steps(file)
        # All its steps were made again.
        is_gone = steps is not None and steps[0] > steps[1]
        if is_gone:
            continue
        with suppress(OSError, ValueError, yaml.YAMLError, RecursionError):
            settings.append(flat_settings(read_plain_text(file, errors="replace")))
            last_steps.append(steps[1] if steps is not None else 0)
        if file == last:
            break
    found: dict[int, Changes] = {}
    for last_step, before, after in zip(last_steps[:-1], settings[:-1], settings[1:], strict=True):
        changes = _differences(before, after)
        if changes:
            found[last_step] = changes
    return found


def _earlier_configs(run_dir: Path) -> list[Path]:
    """Lists config.1.yaml, config.2.yaml, … in this order."""
    numbered = {}
    for file in run_dir.glob("config.*.yaml"):
        number = file.suffixes[0][1:]
        if number.isdecimal() and file.is_file():
            numbered[int(number)] = file
    return [numbered[number] for number in sorted(numbered)]


def _recorded_steps(file: Path) -> tuple[int, int] | None:
    """Reads the first and the last step that earlier settings' first line names.

    None where it names none. The first is behind the last where all were made again.
    """
    try:
        text = read_plain_text(file, errors="replace")
    except OSError:
        return None
    header = HEADER.match(text)
    return (int(header[1]), int(header[2])) if header else None


def _last_step(files: list[Path]) -> int:
    """Reads the last step that earlier settings' first lines name; 0 where none does."""
    last = 0
    for file in files:
        steps = _recorded_steps(file)
        if steps is not None:
            last = max(last, steps[1])
    return last


def _give_up_steps_behind(files: list[Path], step: int) -> None:
    """Takes the steps behind `step` out of first lines: the run makes them again."""
    for file in files:
        steps = _recorded_steps(file)
        if steps is None or steps[1] <= step:
            continue
        text = read_plain_text(file, errors="replace")
        header = f"# steps {steps[0]} to {step}"
        write_atomically(file, HEADER.sub(header, text, count=1))


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
    return _differences({**flat_settings(to_yaml(PPOConfig())), **old}, new)


def _differences(old: dict[str, Any], new: dict[str, Any]) -> Changes:
    """Returns the settings that differ, without those that say how a run is resumed."""
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
