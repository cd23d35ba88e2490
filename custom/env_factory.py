"""From a name in a config to an environment: a class of yours, or LIBRARY:ID.

The environments of other libraries are played by adapters that a feature registers
(`Feature.libraries`). Invariant: a library, and the adapter to it, is imported only when one of its
environments is made. What does not
exist or takes other arguments raises a ValueError that says what is allowed; an exception inside a
user's own environment keeps its type.
"""

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from custom.env import BadEnvironment
from custom.env_calls import parameters_of
from data.brought import brought, folder_without
from data.loading import load_object
from data.texts import text_of

# Characters of what a library raised that are shown.
MAX_REASON_CHARS = 500


@dataclass(frozen=True)
class Library:
    """Describes a library whose environments a config names as LIBRARY:ID.

    Attributes:
        package: what to install for it.
        adapter: "module:Class" of what plays its environments.
        own_process: its environments live in processes of their own unless the config says
            otherwise: they execute the policy's text, draw from global generators, or hang.
        network: those processes keep the network.
        module: what is imported of it; None: the module that is named like the library.
    """

    package: str
    adapter: str
    own_process: bool = True
    network: bool = False
    module: str | None = None


@cache
def libraries() -> dict[str, Library]:
    """Returns the libraries that features bring, by their names in a config."""
    found: dict[str, Library] = {}
    for table in brought("libraries"):
        found |= table
    return found


def environment_names() -> str:
    """Returns the forms that the name of an environment has in a config."""
    return ", ".join([f"{library}:…" for library in libraries()] + ["PACKAGE.MODULE:CLASS"])


def library_of(source: Any) -> str | None:
    """Returns the library behind an environment named LIBRARY:ID, or None."""
    if not isinstance(source, str):
        return None
    library = source.partition(":")[0]
    return library if library in libraries() else None


def make_environment(source: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
    """Makes an environment from its description.

    Args:
        source: "gymnasium:ID", "reasoning_gym:NAME", "textarena:ID", "textworld:NAME",
            "openenv:URL", "verifiers:NAME", "package.module:Class", "/path/file.py:Class", a class,
            or a function that returns an environment.
        kwargs: arguments by name; for a class that is built from a config alone, the fields of its
            `config_cls`.
    Raises:
        ValueError: what does not exist, or arguments that it does not take.
    """
    kwargs = dict(kwargs or {})
    if not isinstance(source, str):
        return _construct(source, kwargs)
    kind, _, name = source.rpartition(":")
    if not kind or not name:
        raise ValueError(
            f"environment {source!r} is unknown; allowed: {environment_names()} "
            "or /path/to/file.py:CLASS"
        )
    library = library_of(source)
    if library:
        return _make_of_library(library, source, kwargs)
    folder = folder_without("libraries", kind)
    if folder:
        raise ValueError(f"environment {source} is played by {folder}, which is not here")
    return _construct(load_object(source, "environment"), kwargs)


def _make_of_library(library: str, source: str, kwargs: dict[str, Any]) -> Any:
    """Makes LIBRARY:ID by the library's adapter."""
    about = libraries()[library]
    try:
        importlib.import_module(about.module or library)
        adapter = load_object(about.adapter, "environment")
    except ImportError as error:
        raise ValueError(
            f"environment {source} needs the package: pip install {about.package}"
        ) from error
    identifier = source.partition(":")[2]
    try:
        return adapter(identifier, **kwargs)
    except FileNotFoundError:
        raise
    # Each library raises in its own way over what it lacks.
    except Exception as error:
        on_one_line = " ".join(f"{type(error).__name__}: {text_of(error)}".split())
        reason = on_one_line[:MAX_REASON_CHARS]
        raise ValueError(f"{source} cannot be made with {kwargs}: {reason}") from error


def _construct(make: Any, kwargs: dict[str, Any]) -> Any:
    """Calls a user's class or function, with its config where it is built from one."""
    if not callable(make):
        raise ValueError(
            f"an environment is made from a class or a function, not from a {type(make).__name__}"
        )
    environment = _call(make, kwargs)
    missing = [name for name in ("reset", "step") if not hasattr(environment, name)]
    if missing:
        name = getattr(make, "__name__", type(make).__name__)
        raise BadEnvironment(
            f"{name} makes a {type(environment).__name__} without {' and '.join(missing)}; an "
            "environment has both"
        )
    return environment


def _call(make: Any, kwargs: dict[str, Any]) -> Any:
    """Calls a class or function with these arguments, or with a config of them."""
    if not kwargs:
        return make()
    taker = taker_of(make, kwargs)
    if taker is make:
        return make(**kwargs)
    return make(taker(**kwargs))


def taker_of(make: Any, kwargs: Mapping[str, Any]) -> Any:
    """Returns what takes the arguments: the class or function itself, or its `config_cls`.

    A class takes them by its config where that is all that it is built from. ValueError where they
    do not fit.
    """
    parameters = list(inspect.signature(make).parameters)
    by_config = isinstance(make, type) and parameters == ["config"] and "config" not in kwargs
    taker = make.config_cls if by_config else make
    try:
        inspect.signature(taker).bind(**kwargs)
    except TypeError as error:
        raise ValueError(
            f"{make.__name__} takes {parameters_of(taker)}, not {sorted(kwargs)}: {error}"
        ) from error
    return taker
