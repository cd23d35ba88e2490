"""From the name in a config to an environment: classes of ours, of a user's file, and adapters of three libraries."""

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from custom.env import BaseEnvironment
from data.loading import load_extern_object

ADAPTERS: dict[str, Callable[..., BaseEnvironment]] = {}


def make_environment(source: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
    """An environment from its description.

    Args:
        source: "gymnasium:ID", "reasoning_gym:NAME", "textarena:ID", "package.module:Class", "/path/file.py:Class", a
            class, or a function that returns an environment.
        kwargs: arguments by name; for a class that is built from a config alone, the fields of its `config_cls`.
    Raises: ValueError for what does not exist, and for arguments that it does not take.
    """
    kwargs = dict(kwargs or {})
    if not isinstance(source, str):
        return _construct(source, kwargs)
    kind, _, name = source.rpartition(":")
    if not kind or not name:
        raise ValueError(
            f"environment {source!r} is unknown; allowed: gymnasium:ID, reasoning_gym:NAME, textarena:ID, "
            "package.module:Class or /path/to/file.py:Class"
        )
    if is_adapter(source):
        library, _, identifier = source.partition(":")
        return ADAPTERS[library](identifier, **kwargs)
    return _construct(_load_class(kind, name), kwargs)


def is_adapter(source: Any) -> bool:
    """Whether the description names an environment of one of the libraries."""
    return isinstance(source, str) and source.partition(":")[0] in ADAPTERS


def fill_template(template: str, fields: Mapping[str, str], setting: str) -> str:
    """`template.format(**fields)`; ValueError names the fields there are."""
    try:
        return template.format(**fields)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{setting}={template!r} cannot be filled ({error!r}); its fields: "
            f"{', '.join(f'{{{name}}}' for name in fields)}. Write {{{{ and }}}} for braces"
        ) from error


def _load_class(place: str, name: str) -> Any:
    if place.endswith(".py"):
        return load_extern_object(place, name)
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"environment {place}:{name}: there is no module {error.name!r}") from error
    if not hasattr(module, name):
        raise ValueError(f"environment {place}:{name}: the module does not define {name!r}")
    return getattr(module, name)


def _construct(make: Any, kwargs: dict[str, Any]) -> Any:
    if not callable(make):
        raise ValueError(f"an environment is made from a class or a function, not from a {type(make).__name__}")
    if not kwargs:
        return make()
    if isinstance(make, type) and list(inspect.signature(make).parameters) == ["config"] and "config" not in kwargs:
        allowed = [f.name for f in dataclasses.fields(make.config_cls)]  # type: ignore[attr-defined]
        if unknown := sorted(kwargs.keys() - set(allowed)):
            raise ValueError(f"{make.__name__} takes no {unknown}; allowed: {', '.join(allowed) or 'nothing'}")
        return make(make.config_cls(**kwargs))  # type: ignore[attr-defined]
    try:
        inspect.signature(make).bind(**kwargs)
    except TypeError as error:
        raise ValueError(f"{make.__name__} cannot be called with {sorted(kwargs)}: {error}") from error
    return make(**kwargs)
