"""Writes training/feature_index.yaml: what each folder of features/ brings.

    python scripts/feature_index.py

The core reads it where a folder is gone, to say which one a key, an option or an environment of it
needs. A test compares the file with the features.
"""

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from custom.env_factory import Library
from data.loading import load_object
from training.config.leaves import leaves
from training.features import INDEX, Feature, features
from training.run.files import write_atomically

HEADER = "# What features bring, for when their folders are gone: python scripts/feature_index.py\n"


def index() -> str:
    """Returns the file's text; what it says of features whose folders are gone stays."""
    entries = yaml.safe_load(INDEX.read_text(encoding="utf-8")) or {}
    entries |= {name: _entry(name, feature) for name, feature in features().items()}
    return HEADER + yaml.safe_dump(dict(sorted(entries.items())), sort_keys=False, width=100)


def _entry(name: str, feature: Feature) -> dict[str, Any]:
    """Returns what is remembered of a feature; what is empty is left out."""
    settings = {}
    if feature.section is not None:
        for key, leaf in leaves(feature.section(), f"{name}."):
            settings[key] = list(leaf.value) if isinstance(leaf.value, tuple) else leaf.value
    entry = {
        "settings": settings,
        "moved_keys": dict(feature.moved_keys),
        "moved_modules": dict(feature.moved_modules),
        "modes": list(feature.modes),
        "libraries": list(_libraries(feature)),
        "loggers": list(feature.loggers),
        "samplers": list(feature.samplers),
        "brings": [each.name for each in fields(Feature) if vars(feature)[each.name]],
    }
    return {part: content for part, content in entry.items() if content}


def _libraries(feature: Feature) -> dict[str, Library]:
    """Returns the feature's libraries of environments."""
    if feature.libraries is None:
        return {}
    table: dict[str, Library] = load_object(feature.libraries, "libraries")
    return table


if __name__ == "__main__":
    write_atomically(INDEX, index())
