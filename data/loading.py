"""Loads users' objects: a name out of a Python file that belongs to no package, or out of a module.

Invariant: a file is executed once per process, so that its classes keep their identity. Modules
that lie beside a user's file can be imported; they come last, behind the project's own and those
that are installed.
"""

import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from data.brought import brought
from data.names import did_you_mean

# The project's own code, installed packages and Python's own; every other file is a user's.
_PROJECT = Path(__file__).resolve().parents[1]
_OWN_FOLDERS = ("data", "custom", "training", "workers", "features", "contrib", "setup")
_INSTALLED = {"site-packages", "dist-packages"}
_LIBRARIES = [Path(sysconfig.get_path("stdlib")), *(_PROJECT / name for name in _OWN_FOLDERS)]
# Reentrant, because a file may load others.
_LOADING = threading.RLock()


def load_extern_object(path: str, name: str, fits: Callable[[Any], bool] | None = None) -> Any:
    """Loads the object `name` that the file `path` defines.

    A file is executed once per process, however often and under whatever spelling it is named, so
    that its classes keep their identity and its registrations happen once. An exception inside it
    keeps its own traceback.

    Args:
        fits: tells of what may be meant; an error names no other, where there is any.
    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not Python, or does not define the name.
    """
    # Another thread must not see a module that is half executed.
    with _LOADING:
        file = Path(path).expanduser().resolve()
        if not file.is_file():
            raise FileNotFoundError(
                f"{path!r} is not a file (looked for {file}); give the path of a .py file"
            )
        module = _module_of(file) or _execute(file, path)
    if name not in vars(module):
        raise ValueError(f"{path} {_lacks(module, name, fits)}")
    return vars(module)[name]


def load_object(source: str, what: str) -> Any:
    """Loads what "/path/file.py:NAME" or "PACKAGE.MODULE:NAME" names.

    Raises:
        ValueError: there is no such module or name; begins with `what`. For a file as
            `load_extern_object`.
    """
    place, _, name = source.rpartition(":")
    if place.endswith(".py"):
        return load_extern_object(place, name)
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        # Another module that it imports may be missing: that error says more.
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            _raise_with_advice(error)
            raise
        raise ValueError(f"{what} {source}: there is no module {error.name!r}") from error
    except SystemExit as error:
        raise ValueError(
            f"{what} {source}: the module ends the program as it is imported (SystemExit: {error})"
        ) from error
    if not hasattr(module, name):
        raise ValueError(f"{what} {source}: the module {_lacks(module, name)}")
    return getattr(module, name)


def is_users_file(filename: str) -> bool:
    """Checks whether a file of code is neither Python's, nor installed, nor of the project's."""
    path = Path(filename)
    if not path.is_file() or not _INSTALLED.isdisjoint(path.parts):
        return False
    return not any(path.is_relative_to(folder) for folder in _LIBRARIES)


def _lacks(module: ModuleType, name: str, fits: Callable[[Any], bool] | None = None) -> str:
    """Says that a module lacks a name, which ones it defines itself, and the nearest of them."""
    own = [known for known in vars(module) if _is_defined_in(module, known)]
    if fits is not None:
        own = [known for known in own if fits(vars(module)[known])] or own
    if name[:1].isupper():
        # A class is looked for; where there is none, whatever is there.
        own = [known for known in own if isinstance(vars(module)[known], type)] or own
    nearest = did_you_mean(name, own)
    listed = ", ".join(sorted(own)) or "nothing"
    return f"does not define {name!r}; it has: {listed}{'.' if nearest else ''}{nearest}"


def _is_defined_in(module: ModuleType, name: str) -> bool:
    """Checks whether a public name is the module's own: no module, no import of another's."""
    value = vars(module)[name]
    if name.startswith("_") or isinstance(value, ModuleType):
        return False
    own_module = getattr(value, "__module__", module.__name__)
    return own_module == module.__name__


def _module_of(file: Path) -> ModuleType | None:
    """Returns the module that this process has loaded from the file, None where there is none."""
    # A copy, as other threads import.
    for module in list(sys.modules.values()):
        if module is not None and vars(module).get("__file__") == str(file):
            return module
    return None


def _execute(file: Path, path: str) -> ModuleType:
    """Executes a file as a module of its own name; `path` is how the user wrote it."""
    name = f"extern_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path!r} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    folder = str(file.parent)
    # For good: functions may import when they are called.
    if folder not in sys.path:
        sys.path.append(folder)
    # Registered before it runs: dataclasses and pickle look a class's module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        del sys.modules[name]
        raise ValueError(
            f"{path!r} ends the program as it is loaded (SystemExit: {error}): take the sys.exit() "
            'out, or put it below `if __name__ == "__main__":`'
        ) from error
    except BaseException as error:
        del sys.modules[name]
        error.add_note(f"raised while loading {file}")
        _raise_with_advice(error)
        raise
    return module


def _raise_with_advice(error: BaseException) -> None:
    """Raises ValueError where a feature knows what a user's file is to import instead."""
    if isinstance(error, ModuleNotFoundError):
        for advise in brought("import_advice"):
            problem = advise(error)
            if problem is not None:
                raise ValueError(problem) from error
