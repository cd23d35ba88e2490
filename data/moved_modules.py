"""Finds modules under their older names: those of features, which once stood elsewhere.

`import training.run.alarms` gives `features.alarms` itself, not a copy, and says so once;
`python -m training.run.report` runs what stands at the new place. What lies in a package that was
imported under its older name is not a copy either. Invariant: a name that is found as it stands is
never looked up here.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

logger = logging.getLogger(__name__)


# The packages that modules have moved out of.
PACKAGES = ("contrib", "custom", "data", "training", "workers")
# Modules that have moved within the core; features say of theirs.
MOVED = {
    "contrib.verifier_process": "custom.verifier_process",
    "custom.models.usage": "custom.model_usage",
    "data.conversation": "data.turn_tokens",
    "data.verl_batch": "data.protocol",
    "training.config.estimator_needs": "training.core_algos.built_in",
    "training.generation": "training.ray_trainer",
}


def new_name(name: str) -> str | None:
    """Returns what a module that has moved is called now; None: it has not."""
    if name.partition(".")[0] not in PACKAGES:
        return None
    moved = MOVED | _moved_to_features()
    parts = name.split(".")
    # The longest name counts: a module may have moved elsewhere than its package.
    for length in range(len(parts), 1, -1):
        new = moved.get(".".join(parts[:length]))
        if new is not None:
            return ".".join([new, *parts[length:]])
    return None


def _moved_to_features() -> dict[str, str]:
    """Returns by the older names of features' modules what they are called now."""
    # By name and late: this file is the lowest of all.
    features = importlib.import_module("training.features")
    try:
        moved: dict[str, str] = features.moved_modules()
    except ImportError:
        # A feature that cannot be read is told where features are read; here another name was
        # asked for, perhaps by that feature.
        return {}
    return moved


class MovedModule(importlib.abc.InspectLoader):
    """Loads a module under its older name.

    Args:
        new: its name now.
        silent: whether to say nothing of that.
    """

    def __init__(self, new: str, silent: bool) -> None:
        self.new = new
        self.silent = silent
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the module itself, which has its own name."""
        module = importlib.import_module(self.new)
        self.spec = module.__spec__
        self._tell(spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Gives the module its own spec back, which importing has replaced; it has run already."""
        module.__spec__ = self.spec
        module.__loader__ = self.spec.loader if self.spec else None

    def get_source(self, fullname: str) -> str | None:
        """Returns the module's source."""
        return self._loader().get_source(self.new)

    def get_code(self, fullname: str) -> CodeType | None:
        """Returns the module's code, which `python -m` runs."""
        self._tell(fullname)
        return self._loader().get_code(self.new)

    def _loader(self) -> importlib.abc.InspectLoader:
        """Returns what loads the module from its new place."""
        spec = importlib.util.find_spec(self.new)
        assert spec is not None
        assert isinstance(spec.loader, importlib.abc.InspectLoader)
        return spec.loader

    def _tell(self, old: str) -> None:
        if not self.silent:
            logger.warning("%s is called %s now", old, self.new)


def moved_spec(old: str, new: str, *, silent: bool) -> ModuleSpec | None:
    """Returns a spec that loads a module from its new place; None: it is not there.

    Raises:
        ModuleNotFoundError: it stood in a feature whose folder is gone.
    """
    importlib.import_module("training.features").require_module(new, old)
    found = importlib.util.find_spec(new)
    if found is None:
        return None
    is_package = found.submodule_search_locations is not None
    spec = ModuleSpec(old, MovedModule(new, silent), is_package=is_package)
    spec.origin = found.origin
    return spec


class MovedModules(importlib.abc.MetaPathFinder):
    """Finds a module that has moved, where nothing else has found it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns a spec that loads the module from its new place; None: it has not moved."""
        new = new_name(fullname)
        if new is None:
            return None
        return moved_spec(fullname, new, silent=False)


class InsideMovedPackages(importlib.abc.MetaPathFinder):
    """Finds what lies in a package that was imported under its older name, before others do.

    Those would find the file, and load it a second time under the older name.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns a spec that loads the module from its new place; None: it has not moved."""
        parent = fullname.rpartition(".")[0]
        package = sys.modules.get(parent)
        if package is None or package.__name__ == parent or not _is_ours(parent):
            return None
        new = new_name(fullname)
        if new is None:
            return None
        return moved_spec(fullname, new, silent=True)


class LeftFolders(importlib.abc.MetaPathFinder):
    """Finds a package that has moved and whose old folder is still there, with compiled files.

    Git leaves such a folder, and Python takes it for a package without files.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns a spec that loads the package from its new place; None: it has not moved."""
        if path is None or not _is_ours(fullname):
            return None
        name = fullname.rpartition(".")[2]
        if not any(_is_left(Path(folder, name)) for folder in path):
            return None
        new = new_name(fullname)
        if new is None:
            return None
        return moved_spec(fullname, new, silent=False)


def _is_left(folder: Path) -> bool:
    """Checks whether a folder is no package, and no module stands beside it."""
    if not folder.is_dir():
        return False
    return not (folder / "__init__.py").exists() and not folder.with_suffix(".py").exists()


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def install() -> None:
    """Lets the older names be found in this process, once."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, LeftFolders())
        sys.meta_path.insert(0, InsideMovedPackages())
        sys.meta_path.append(MovedModules())
