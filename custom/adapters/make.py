"""The way from a name in a config to an environment: a class of ours or of a user's file, or an adapter.

Invariant: what does not exist or takes other arguments raises a ValueError that says what is allowed; an exception
inside a user's own environment keeps its type.
"""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from custom.adapters.base import ENVIRONMENT_NAMES, LIBRARIES, library_of
from data.loading import load_object


def make_environment(source: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
    """Makes an environment from its description.

    Args:
        source: "gymnasium:ID", "reasoning_gym:NAME", "textarena:ID", "textworld:NAME", "verifiers:NAME",
            "package.module:Class", "/path/file.py:Class", a class, or a function that returns an environment.
        kwargs: arguments by name; for a class that is built from a config alone, the fields of its `config_cls`.
    Raises: ValueError for what does not exist, and for arguments that it does not take.
    """
    kwargs = dict(kwargs or {})
    if not isinstance(source, str):
        return _construct(source, kwargs)
    kind, _, name = source.rpartition(":")
    if not kind or not name:
        raise ValueError(f"environment {source!r} is unknown; allowed: {ENVIRONMENT_NAMES} or /path/to/file.py:CLASS")
    if library := library_of(source):
        about = LIBRARIES[library]
        try:
            importlib.import_module(library)
            adapter = load_object(f"custom.adapters.{library}:{about.adapter}", "environment")
        except ImportError as error:
            raise ValueError(f"environment {source} needs the package: pip install {about.package}") from error
        try:
            return adapter(source.partition(":")[2], **kwargs)
        except FileNotFoundError:
            raise
        # Each library raises in its own way over what it lacks.
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            raise ValueError(f"{source} cannot be made with {kwargs}: {why}") from error
    return _construct(load_object(source, "environment"), kwargs)


def _construct(make: Any, kwargs: dict[str, Any]) -> Any:
    if not callable(make):
        raise ValueError(f"an environment is made from a class or a function, not from a {type(make).__name__}")
    if not kwargs:
        return make()
    taking = taker_of(make, kwargs)
    return make(**kwargs) if taking is make else make(taking(**kwargs))


def taker_of(make: Any, kwargs: Mapping[str, Any]) -> Any:
    """Returns what takes the arguments, a class that is built from a config alone or its config; else ValueError."""
    parameters = list(inspect.signature(make).parameters)
    by_config = isinstance(make, type) and parameters == ["config"] and "config" not in kwargs
    taking = make.config_cls if by_config else make
    try:
        inspect.signature(taking).bind(**kwargs)
    except TypeError as error:
        raise ValueError(f"{make.__name__} takes {inspect.signature(taking)}, not {sorted(kwargs)}: {error}") from error
    return taking
