"""Resolves names at first use: those of modules that are heavy, or that live in a feature.

    __getattr__ = late_names(__name__, {"PythonTool": "features.sandbox.python_tool"})

Invariant: nothing is imported before a name of it is asked for, and a name whose feature is gone
says which folder it lived in.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def late_names(module: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a module's `__getattr__`.

    Args:
        module: its name.
        places: a name of the module -> the module that has it.
    """

    def resolve(name: str) -> Any:
        """Returns what the module has under a name that it does not define itself.

        Raises:
            AttributeError: it has none of that name.
            ModuleNotFoundError: the feature that has it is not here.
        """
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(_imported(f"{module}.{name}", places[name]), name)

    return resolve


def _imported(name: str, place: str) -> Any:
    """Imports the module that has a name."""
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        folder = "/".join(place.split(".")[:2])
        is_gone = error.name is not None and f"{place}.".startswith(f"{error.name}.")
        if is_gone and folder.startswith("features/"):
            raise ModuleNotFoundError(
                f"{name} is a part of {folder}, which is not here: put the folder back, or do "
                "without it",
                name=error.name,
            ) from error
        raise
