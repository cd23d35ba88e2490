"""Finds the folders of features/ and says what each brings; nothing else reads them.

A feature is a folder `features/NAME` that one may delete. Its `feature.py` holds a `FEATURE`:

    FEATURE = Feature(
        section=AlarmSettings,                              # its settings, as alarms.KEY
        observer="features.alarms.observer:open_observer",  # what watches a run
    )

`feature.py` imports this file and the feature's settings alone. Everything else is named as
"module:name", and imported where a run asks for it. Invariant: the core knows no feature by name; a
folder that is gone leaves no trace but the sentence for whoever asks for something of it, which
stands in `feature_index.yaml`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[1] / "features"
# What features/ held when scripts/feature_index.py was last run.
INDEX = Path(__file__).with_name("feature_index.yaml")


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Says what a feature brings; whatever is left out it does not bring.

    Attributes:
        section: the class of its settings, a `Section`. The config has it under the folder's name,
            and `config.section(CLASS)` returns it.
        moved_keys: a setting's older dotted key -> its key now.
        moved_modules: an older module, or package with all below it -> its name now.
        checks: "module:function", config -> sentences on what several sections contradict.
        translator: "module:Class" of the `KeyTranslator` of another program's keys; see
            training/config/translator.py. At most one feature brings one.
        observer: "module:function", ObservedRun -> `Observer`, or None where the config turns it
            off; see training/observers.py.
        probes: "module:function", (config, role) -> list of `UpdateProbe`; see
            workers/model/probe.py.
        sync_probes: "module:function", config -> list of `SyncProbe`.
        modes: an option of the command line, such as --plan -> "module:function", which is called
            in place of training with the words of the command line and the signals that end it,
            and returns the exit code.
        kinds: "module:NAME" of the kinds of episodes; see workers/rollout/kinds.py.
        services: "module:function", (config, may they write files) -> list of `SideService`, which
            environments, rewards and programs may ask; see custom/side_services.py.
        tools: "module:function", config -> list of `ToolSource`, whose tools stand beside
            `agent.tools`; see custom/tools/definition.py.
        starter: "module:function", (config, program, argv) -> exit code where it starts the run in
            processes of its own, or None where the run goes on in this one.
        libraries: "module:NAME" of a table: a name in LIBRARY:ID of an environment -> `Library`;
            see custom/env_factory.py.
        import_advice: "module:function", ModuleNotFoundError of a user's file -> what to write
            instead, or None.
    """

    section: type | None = None
    moved_keys: Mapping[str, str] = field(default_factory=dict)
    moved_modules: Mapping[str, str] = field(default_factory=dict)
    checks: str | None = None
    translator: str | None = None
    observer: str | None = None
    probes: str | None = None
    sync_probes: str | None = None
    modes: Mapping[str, str] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    services: str | None = None
    tools: str | None = None
    starter: str | None = None
    libraries: str | None = None
    import_advice: str | None = None


@dataclass(frozen=True, kw_only=True)
class AbsentFeature:
    """Remembers a feature whose folder is gone, as `feature_index.yaml` has it.

    Attributes:
        settings: the defaults of its settings, by dotted key.
        moved_keys: as of `Feature`.
        modes: its options of the command line.
        libraries: the names of its libraries of environments.
        translator: whether it reads another program's keys.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    moved_keys: Mapping[str, str] = field(default_factory=dict)
    modes: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    translator: bool = False


@cache
def features() -> dict[str, Feature]:
    """Returns the features that there are by the names of their folders, in alphabetical order.

    Raises:
        ImportError: a feature.py says nothing, as one that is still being imported does.
    """
    found = {}
    for file in sorted(FOLDER.glob("*/feature.py")):
        name = file.parent.name
        module = importlib.import_module(f"{FOLDER.name}.{name}.feature")
        feature = vars(module).get("FEATURE")
        if not isinstance(feature, Feature):
            raise ImportError(f"{file} has no FEATURE = Feature(...)", name=module.__name__)
        found[name] = feature
    return found


@cache
def absent_features() -> dict[str, AbsentFeature]:
    """Returns the features whose folders are gone, by their names."""
    index = yaml.safe_load(INDEX.read_text(encoding="utf-8"))
    return {name: AbsentFeature(**entry) for name, entry in index.items() if name not in features()}


def folder_of(name: str) -> str:
    """Returns how a feature's folder is called in sentences."""
    return f"{FOLDER.name}/{name}"


def sections() -> dict[str, type]:
    """Returns the classes of the features' settings, by the features' names."""
    return {name: each.section for name, each in features().items() if each.section is not None}


def moved_keys() -> dict[str, str]:
    """Returns by the older key of a feature's setting what it is called now."""
    moved: dict[str, str] = {}
    for feature in features().values():
        moved |= feature.moved_keys
    return moved


def moved_modules() -> dict[str, str]:
    """Returns by the older name of a feature's module what it is called now."""
    moved: dict[str, str] = {}
    for feature in features().values():
        moved |= feature.moved_modules
    return moved


def named(attribute: str) -> Iterator[tuple[str, str]]:
    """Yields (feature, "module:name") for each feature that brings this attribute."""
    for name, feature in features().items():
        place = vars(feature)[attribute]
        if place is not None:
            yield name, place


def brought(attribute: str) -> Iterator[Any]:
    """Yields what each feature names under this attribute, imported."""
    for _, place in named(attribute):
        module, _, name = place.partition(":")
        yield getattr(importlib.import_module(module), name)


def folder_without(attribute: str, name: str) -> str | None:
    """Returns the folder that is gone and with it the name under this attribute; else None."""
    for feature, absent in absent_features().items():
        if name in vars(absent)[attribute]:
            return folder_of(feature)
    return None
