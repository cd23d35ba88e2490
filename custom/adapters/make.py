"""The way from a name in a config to an environment: a class of ours or of a user's file, or an adapter.

Invariant: what does not exist or takes other arguments raises a ValueError that says what is allowed; an exception
inside a user's own code keeps its type.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from custom.adapters.base import ENVIRONMENT_NAMES, library_of
from custom.adapters.gymnasium import GymnasiumEnvironment
from custom.adapters.reasoning_gym import ReasoningGymEnvironment
from custom.adapters.textarena import TextArenaEnvironment
from custom.adapters.textworld import TextWorldEnvironment
from custom.adapters.verifiers import VerifiersEnvironment
from custom.env import BaseEnvironment
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
        return ADAPTERS[library](source.partition(":")[2], **kwargs)
    return _construct(load_object(source, "environment"), kwargs)


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


ADAPTERS: dict[str, Callable[..., BaseEnvironment]] = {
    "gymnasium": GymnasiumEnvironment,
    "reasoning_gym": ReasoningGymEnvironment,
    "textarena": TextArenaEnvironment,
    "textworld": TextWorldEnvironment,
    "verifiers": VerifiersEnvironment,
}
