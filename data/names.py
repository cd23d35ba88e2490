"""Names that settings choose from: their registries, and errors that say what is allowed, and the nearest of it."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

Named = TypeVar("Named")


def did_you_mean(given: str, allowed: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns " Did you mean 'x'?" with the nearest of the allowed names; nothing where none is as near as `cutoff`."""
    near = difflib.get_close_matches(given, list(allowed), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""


def same_words(given: str, other: str) -> bool:
    """Says whether each word of a name is, but for spelling, one of the other: total_steps of total_training_steps."""

    def near(a: str, b: str) -> bool:
        return difflib.SequenceMatcher(None, a, b).ratio() >= 0.7

    words, own = other.split("_"), given.split("_")
    return all(any(near(word, mine) for word in words) for mine in own) or (len(own) == 1 and near(given, other))


def unknown_name(what: str, given: str, allowed: Iterable[str]) -> ValueError:
    """Makes the error for a name outside `allowed`; `what` is the setting that holds it."""
    names = sorted(allowed)
    return ValueError(f"{what}={given!r} is unknown; allowed: {', '.join(names)}.{did_you_mean(given, names)}")


def registering(registry: dict[str, Any], what: str, name: str) -> Callable[[Named], Named]:
    """Makes a decorator that enters a class or function as `name`; ValueError if that belongs to another."""

    def register(made: Named) -> Named:
        taken = registry.setdefault(name, made)
        if taken is not made:
            owner = f"{taken.__module__}.{taken.__qualname__}"
            raise ValueError(f"{what} {name!r} is already registered by {owner}; register yours under another name")
        return made

    return register


def registered(registry: Mapping[str, Named], setting: str, name: str) -> Named:
    """Returns what is registered as `name`; ValueError with the names that the setting may have."""
    if name not in registry:
        raise unknown_name(setting, name, registry)
    return registry[name]
