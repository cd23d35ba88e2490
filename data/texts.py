"""Texts and names: what any room says in more than a line of code, from texts.yaml, and errors about unknown names.

`say` fills a text in, `warn_once` logs one; `did_you_mean` finds the nearest of the names that a setting chooses from.

Invariant: every text is said somewhere, with all the facts that it names; tests/unit/test_texts.py looks. Nothing here
imports torch, as an environment's process says such texts too.
"""

import difflib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml


def table(module: str, name: str = "") -> Any:
    """Returns the YAML table that lies beside a module's file, of its name or another."""
    path = Path(module)
    return yaml.safe_load(path.with_name(f"{name or path.stem}.yaml").read_text(encoding="utf-8"))


@cache
def texts() -> dict[str, str]:
    """Returns every text by its name, read when the first is said."""
    return table(__file__)


def say(text: str, /, **facts: Any) -> str:
    """Returns a text, with the facts filled in."""
    return texts()[text].format(**facts)


@cache
def warn_once(logger: str, text: str) -> None:
    """Logs a warning, the first time that it is given in this process."""
    logging.getLogger(logger).warning(text)


def say_where(found: Mapping[str, object], /, **facts: Any) -> Iterator[str]:
    """Yields the texts of what was found, with the facts filled in."""
    return (say(text, **facts) for text, there in found.items() if there)


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
    return all(any(near(word, mine) for word in words) for mine in own) or (
        len(own) == 1 and near(given, other)
    )


def unknown_name(what: str, given: str, allowed: Iterable[str]) -> ValueError:
    """Makes the error for a name outside `allowed`; `what` is the setting that holds it."""
    names = sorted(allowed)
    return ValueError(
        f"{what}={given!r} is unknown; allowed: {', '.join(names)}.{did_you_mean(given, names)}"
    )


def registering(registry: dict[str, Any], what: str, name: str) -> Callable[[Named], Named]:
    """Makes a decorator that enters a class or function as `name`; ValueError if that belongs to another."""

    def register(made: Named) -> Named:
        taken = registry.setdefault(name, made)
        if taken is not made:
            owner = f"{taken.__module__}.{taken.__qualname__}"
            raise ValueError(
                f"{what} {name!r} is already registered by {owner}; register yours under another name"
            )
        return made

    return register


def registered(registry: Mapping[str, Named], setting: str, name: str) -> Named:
    """Returns what is registered as `name`; ValueError with the names that the setting may have."""
    if name not in registry:
        raise unknown_name(setting, name, registry)
    return registry[name]
