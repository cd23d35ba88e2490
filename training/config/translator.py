"""Defines what is asked of another program's keys: what each is called here, or what is said of it.

A feature registers a `KeyTranslator` (`Feature.translator`); without one, our own keys load all the
same, and every other key is unknown. Invariant: a translator knows no key of ours as its own, so
that nothing is shadowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from training.features import brought

if TYPE_CHECKING:
    from training.config.layers import Layers
    from training.config.schema.ppo import PPOConfig


@dataclass(frozen=True)
class Verdict:
    """Records what happens to a key that has no meaning here: it is dropped, or refused."""

    reason: str
    outcome: Literal["silent", "warning", "error"]


@dataclass(frozen=True)
class ParentFile:
    """Names a file whose values come before those of the file that extends it.

    Attributes:
        section: the dotted key that its values stand under; empty: they are the whole tree's.
    """

    path: Path
    section: str = ""


@dataclass
class Parents:
    """Collects what a file extends in another program's way.

    Attributes:
        files: whose values come before the file's own, in their order.
        notes: what became of other entries.
        problems: what is wrong with them.
    """

    files: list[ParentFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class KeyTranslator:
    """Translates another program's keys; this one knows none.

    Attributes:
        program: the program's name.
    """

    program = "another program"

    def new_key(self, key: str) -> str | None:
        """Returns our name of a key that is called otherwise here; None for other keys."""
        return None

    def holds_renamed_keys(self, key: str) -> bool:
        """Checks whether keys inside this one, a mapping, are called otherwise here."""
        return False

    def settings_for(self, key: str, value: Any) -> dict[str, Any] | None:
        """Returns what a value of a key is here, {our key: value}; None where it is nothing."""
        return None

    def judge(self, key: str, value: Any) -> Verdict | None:
        """Returns what happens to a key without meaning here; None where it is unknown."""
        return None

    def leaves_null(self, key: str) -> bool:
        """Checks whether null in this key of ours leaves it as it is."""
        return False

    def shares_limit(self, key: str) -> bool:
        """Checks whether a key of ours is one limit with another program's, of which ours stays."""
        return False

    def drops(self, word: str) -> bool:
        """Checks whether a word of a key is the program's own machinery, and is passed over."""
        return False

    def take_parents(self, tree: dict[Any, Any], path: Path) -> Parents:
        """Takes out of a file's tree what it extends in the program's way."""
        return Parents()

    def complete(self, layers: Layers) -> None:
        """Sets what several keys say only together, after all layers."""

    def contradictions(self, values: Mapping[str, Any], config: PPOConfig) -> Iterator[str]:
        """Yields how values of the program's keys contradict the config that was made.

        Args:
            values: as they were given, by the program's keys.
        """
        yield from ()


@cache
def key_translator() -> KeyTranslator:
    """Returns the translator that a feature brings, or one that knows nothing."""
    found = list(brought("translator"))
    translator: KeyTranslator = found[0]() if found else KeyTranslator()
    return translator
