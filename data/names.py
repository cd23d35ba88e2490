"""Looks up names that a setting chooses from, and makes the error for one that is not among them.

Invariant: a registry holds each name once; the error for an unknown name lists all allowed ones and
the nearest of them. Nothing here imports torch, as an environment's process raises such errors too.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

Registered = TypeVar("Registered")

# Words of two names count as one word but for spelling where they are at least so alike.
SAME_WORD = 0.7


def did_you_mean(name: str, allowed: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns " Did you mean 'x'?" with the nearest allowed name, "" where none is near enough.

    Args:
        name: what was given.
        allowed: the names to choose from.
        cutoff: the likeness, from 0 to 1, that the nearest must have.
    """
    nearest = nearest_name(name, allowed, cutoff)
    if nearest is None:
        return ""
    return f" Did you mean {nearest!r}?"


def nearest_name(name: str, allowed: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the allowed name that is most like the given one, None where none is near enough."""
    names = list(allowed)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    if nearest:
        return nearest[0]
    # In other letters, as GRPO.
    return next((other for other in names if other.lower() == name.lower()), None)


def same_words(name: str, other: str) -> bool:
    """Checks whether each word of a name is, but for spelling, one of the other's.

    The words of `total_steps` are among those of `total_training_steps`. A name of one word may
    also be the whole other name misspelt.
    """
    words = name.split("_")
    other_words = other.split("_")
    if len(words) == 1 and _alike(name, other):
        return True
    return all(_alike_one_of(other_words, word) for word in words)


def _alike_one_of(words: list[str], word: str) -> bool:
    return any(_alike(candidate, word) for candidate in words)


def _alike(word: str, other: str) -> bool:
    return difflib.SequenceMatcher(None, word, other).ratio() >= SAME_WORD


def unknown_name(setting: str, name: str, allowed: Iterable[str]) -> ValueError:
    """Makes the error for a name that is not in `allowed`; `setting` is the key that holds it."""
    names = sorted(allowed)
    return ValueError(
        f"{setting}={name!r} is unknown; allowed: {', '.join(names)}.{did_you_mean(name, names)}"
    )


def registering(
    registry: dict[str, Any], what: str, name: str
) -> Callable[[Registered], Registered]:
    """Makes a decorator that enters a class or function into a registry.

    Args:
        registry: name -> what is registered under it; the decorator adds to it.
        what: what the registry holds, for the error: "policy loss".
        name: the name to register under.
    Raises:
        ValueError: (the decorator) another object has that name.
    """

    def register(registrant: Registered) -> Registered:
        holder = registry.setdefault(name, registrant)
        if holder is not registrant:
            owner = f"{holder.__module__}.{holder.__qualname__}"
            raise ValueError(
                f"{what} {name!r} is already registered by {owner}; "
                "register yours under another name"
            )
        return registrant

    return register


def registered(registry: Mapping[str, Registered], setting: str, name: str) -> Registered:
    """Returns what is registered as `name`.

    Raises:
        ValueError: nothing is; the error lists the names that `setting` may have.
    """
    if name not in registry:
        raise unknown_name(setting, name, registry)
    return registry[name]
