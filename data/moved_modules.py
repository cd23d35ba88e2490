"""Finds modules under their older names: those of features, which once stood elsewhere.

`import features.alarms` gives `features.alarms` itself, not a copy, and says so once;
`python -m features.run_page.report` runs what stands at the new place. Invariant: only a name that
nothing else finds is looked up here.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

logger = logging.getLogger(__name__)


# The packages that features have moved out of.
PACKAGES = ("contrib", "custom", "data", "training", "workers")


def new_name(name: str) -> str | None:
    """Returns what a module that has moved is called now; None: it has not."""
    if name.partition(".")[0] not in PACKAGES:
        return None
    # By name and late: this file is the lowest of all, and features say what has moved.
    features = importlib.import_module("training.features")
    for old, new in features.moved_modules().items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


class MovedModule(importlib.abc.InspectLoader):
    """Loads a module under its older name.

    Args:
        new: its name now.
    """

    def __init__(self, new: str) -> None:
        self.new = new
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the module itself, which has its own name."""
        module = importlib.import_module(self.new)
        self.spec = module.__spec__
        logger.warning("%s is called %s now", spec.name, self.new)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Gives the module its own spec back, which importing has replaced; it has run already."""
        module.__spec__ = self.spec
        module.__loader__ = self.spec.loader if self.spec else None

    def get_source(self, fullname: str) -> str | None:
        """Returns the module's source, for `python -m`."""
        spec = importlib.util.find_spec(self.new)
        assert spec is not None
        assert isinstance(spec.loader, importlib.abc.InspectLoader)
        return spec.loader.get_source(self.new)

    def get_code(self, fullname: str) -> CodeType | None:
        """Returns the module's code, for `python -m`."""
        spec = importlib.util.find_spec(self.new)
        assert spec is not None
        assert isinstance(spec.loader, importlib.abc.InspectLoader)
        return spec.loader.get_code(self.new)


class MovedModules(importlib.abc.MetaPathFinder):
    """Finds a module that has moved, where nothing else has found it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns a spec that loads the module from its new place; None: it has not moved."""
        new = new_name(fullname)
        if new is None:
            return None
        found = importlib.util.find_spec(new)
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        spec = ModuleSpec(fullname, MovedModule(new), is_package=is_package)
        spec.origin = found.origin
        return spec


def install() -> None:
    """Lets the older names be found in this process, once."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
