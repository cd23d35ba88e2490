"""Names in the trainer's settings what a program has as objects: environment, reward_fn, dataset.

Invariant: what the settings name by a file is the very class or function that the object is, or is
an instance of. An object that no file defines is named as `missing`.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data.rl_dataset import RLHFDataset
from training.config.schema.agent import PASSED_AS_OBJECT


@dataclass(frozen=True)
class ImportPath:
    """Holds the trainer's settings that name an object.

    Attributes:
        settings: by dotted key; where there is no import path they say that an object is needed.
        missing: what the object is, if it has no import path; else empty.
    """

    settings: dict[str, Any]
    missing: str = ""


@dataclass(frozen=True)
class Definition:
    """Locates the class or function that an object is, or is an instance of.

    Attributes:
        target: that class or function.
        name: its qualified name in its module.
        file: the Python file from which it can be imported; None if there is none.
    """

    target: Any
    name: str
    file: str | None

    @property
    def description(self) -> str:
        """Returns the name with its module's, for a reader who must supply the object."""
        return f"{self.name} of {self.target.__module__}"


def find_definition(thing: Any) -> Definition:
    """Finds where an object's class, or the class or function that it is itself, is defined.

    The script that runs (`__main__`) is no place to import from, nor is the inside of a function.
    """
    target = thing if hasattr(thing, "__qualname__") else type(thing)
    name = target.__qualname__
    module = sys.modules.get(target.__module__)
    is_importable = target.__module__ != "__main__" and getattr(module, name, None) is target
    # A module that is built into Python has no file.
    file = getattr(module, "__file__", None) if is_importable else None
    return Definition(target=target, name=name, file=file)


def environment_path(environment: Any) -> ImportPath:
    """Names an environment by its class, or by the function that makes it."""
    definition = find_definition(environment)
    if definition.file is None:
        return ImportPath(
            {"agent.environment.name": PASSED_AS_OBJECT}, missing=definition.description
        )
    return ImportPath(
        {
            "agent.environment.path": definition.file,
            "agent.environment.cls": definition.name,
        }
    )


def reward_fn_path(reward_fn: Any) -> ImportPath:
    """Names a reward function; an instance of a class is made by its program, and has no path."""
    definition = find_definition(reward_fn)
    file = definition.file if definition.target is reward_fn else None
    settings = {
        "custom_reward_function.path": PASSED_AS_OBJECT if file is None else file,
        "custom_reward_function.name": definition.name,
    }
    return ImportPath(settings, missing=definition.description if file is None else "")


def dataset_path(dataset: Any) -> ImportPath:
    """Names a dataset by its files of rows, and by its class where that is not RLHFDataset."""
    definition = find_definition(dataset)
    reads_files = isinstance(dataset, RLHFDataset) and hasattr(dataset, "data_files")
    if definition.file is None or not reads_files:
        return ImportPath({"data.train_files": [PASSED_AS_OBJECT]}, missing=definition.description)
    settings: dict[str, Any] = {"data.train_files": [str(file) for file in dataset.data_files]}
    if definition.target is not RLHFDataset:
        settings["data.custom_cls.path"] = definition.file
        settings["data.custom_cls.name"] = definition.name
    return ImportPath(settings)


IMPORT_PATH_OF = {
    "environment": environment_path,
    "reward_fn": reward_fn_path,
    "dataset": dataset_path,
}


def import_paths(objects: Mapping[str, Any]) -> dict[str, ImportPath]:
    """Returns for each object, by its role, the trainer's settings that name it."""
    return {role: IMPORT_PATH_OF[role](thing) for role, thing in objects.items()}
