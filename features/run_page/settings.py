"""Compares settings: with the defaults, over a run's steps, and of runs with each other.

Settings are flat: dotted key -> value. Values are shown as text, as YAML would write them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from training.config import PPOConfig
from training.config.leaves import leaves
from training.config.plain_files import read_plain_text
from training.config.reference import to_yaml
from training.run.recorded_config import RESUME_SETTINGS, flat_settings

Settings = Mapping[str, Any]
MOST_VALUE_CHARS = 600
# Beside seeds: settings that say where a run is kept, and how it is resumed.
OF_ONE_RUN = (
    "trainer.default_local_dir",
    "trainer.experiment_name",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "records.folder",
    *RESUME_SETTINGS,
)


class Difference(NamedTuple):
    """Names a setting that is not the default."""

    key: str
    value: str
    default: str
    doc: str


class Change(NamedTuple):
    """Says which settings changed behind a step: key -> (before, after), as text."""

    step: int
    changed: dict[str, tuple[str, str]]


def read_settings(path: Path) -> dict[str, Any]:
    """Reads a recorded configuration; one that is not there, or is damaged, has no settings."""
    try:
        return flat_settings(read_plain_text(path, errors="replace"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}


@cache
def default_settings() -> dict[str, Any]:
    """Returns every setting's default."""
    return flat_settings(to_yaml(PPOConfig()))


@cache
def setting_docs() -> dict[str, str]:
    """Returns every setting's line of documentation."""
    return {key: leaf.doc for key, leaf in leaves(PPOConfig())}


def as_text(value: Any) -> str:
    """Writes a setting's value as people read it; "not set" of a missing one."""
    if value is None:
        return "null"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= MOST_VALUE_CHARS else text[:MOST_VALUE_CHARS] + "…"


def differences_from_defaults(settings: Settings) -> list[Difference]:
    """Lists the settings that are not the defaults, in the order of the settings."""
    defaults = default_settings()
    docs = setting_docs()
    found = []
    for key, value in settings.items():
        if key in defaults and defaults[key] == value:
            continue
        default = as_text(defaults[key]) if key in defaults else "no such setting now"
        doc = docs.get(key, "")
        found.append(Difference(key=key, value=as_text(value), default=default, doc=doc))
    return found


def changes_of_folder(run_dir: Path, now: Settings) -> list[Change]:
    """Lists the changes of settings that config.N.yaml and config.yaml record, by step."""
    earlier = []
    for file in run_dir.glob("config.*.yaml"):
        number = re.fullmatch(r"config\.([0-9]+)\.yaml", file.name)
        if number is None or not file.is_file():
            continue
        header = re.match(r"# steps ([0-9]{1,9}) to ([0-9]{1,9})\b", _first_line(file))
        # Where the first is behind the last, all its steps were made again.
        if header and int(header[1]) <= int(header[2]):
            earlier.append((int(number[1]), int(header[2]), read_settings(file)))
    earlier.sort(key=lambda entry: entry[0])
    changes = []
    for place, (_, last_step, before) in enumerate(earlier):
        after = earlier[place + 1][2] if place + 1 < len(earlier) else now
        changed = changed_settings(before, after)
        if changed:
            changes.append(Change(step=last_step, changed=changed))
    return changes


def _first_line(file: Path) -> str:
    try:
        return read_plain_text(file, errors="replace").partition("\n")[0]
    except OSError:
        return ""


def changed_settings(before: Settings, after: Settings) -> dict[str, tuple[str, str]]:
    """Returns the settings that differ, as text, without those that say how a run is resumed."""
    changed = {}
    for key in {**before, **after}:
        if key in RESUME_SETTINGS:
            continue
        pair = (_text_of(before, key), _text_of(after, key))
        if pair[0] != pair[1]:
            changed[key] = pair
    return changed


def _text_of(settings: Settings, key: str) -> str:
    return as_text(settings[key]) if key in settings else "not set"


def is_of_one_run(key: str) -> bool:
    """Checks whether a setting may differ between repetitions of a run: seeds, folders, names."""
    return key in OF_ONE_RUN or _is_seed(key)


def _is_seed(key: str) -> bool:
    word = key.rsplit(".", 1)[-1]
    return word == "seed" or word.endswith("_seed")


def seeds_of(settings: Settings) -> dict[str, Any]:
    """Returns a run's seeds."""
    return {key: value for key, value in settings.items() if _is_seed(key)}


def of_repetition(settings: Settings) -> str:
    """Returns what a run has in common with its repetitions under other seeds, as a key."""
    own = {key: value for key, value in settings.items() if not is_of_one_run(key)}
    return json.dumps(own, sort_keys=True, default=str)


def table_of_differences(settings: Sequence[Settings]) -> list[tuple[str, list[str]]]:
    """Lists the settings in which several runs differ, with each one's value; seeds left out."""
    keys: dict[str, None] = {}
    for one in settings:
        keys.update(dict.fromkeys(one))
    rows = []
    for key in keys:
        if is_of_one_run(key):
            continue
        values = [_text_of(one, key) for one in settings]
        if len(set(values)) > 1:
            rows.append((key, values))
    return rows
