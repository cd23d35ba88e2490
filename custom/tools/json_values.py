"""Decodes the JSON values in a text that a model wrote, broken ones included.

Invariant: nothing here raises, and the time is linear in the text: what fails to decode is skipped
up to where it broke, and after MAX_BROKEN failures the rest of the text is garbage.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# So many values that do not decode are garbage, not calls: nothing is looked for behind them.
MAX_BROKEN = 64

SPACE = re.compile(r"\s*")
_OBJECT_START = re.compile(r'\{\s*"')


@dataclass(frozen=True)
class BrokenValue:
    """Stands for a value that does not decode."""

    problem: str


class JSONReader:
    """Decodes JSON values out of a text, and counts those that fail."""

    # Not strict: models write raw newlines into strings of code.
    decoder = json.JSONDecoder(strict=False)

    def __init__(self, text: str) -> None:
        self.text = text
        self.broken = 0

    @property
    def gave_up(self) -> bool:
        """Returns whether so many values broke that the rest of the text is garbage."""
        return self.broken >= MAX_BROKEN

    def read(self, start: int) -> tuple[Any, int]:
        """Decodes the value at `start`.

        Returns:
            The value and where it ends; or a BrokenValue and where it broke: nothing before that
            can begin another call.
        """
        try:
            return self.decoder.raw_decode(self.text, start)
        except json.JSONDecodeError as error:
            self.broken += 1
            problem = f"{error.msg} at character {error.pos - start}"
            return BrokenValue(problem), error.pos
        # Thousands of levels or digits: garbage up to the end.
        except (RecursionError, ValueError):
            self.broken = MAX_BROKEN
            return BrokenValue("nested too deeply, or a number too long"), len(self.text)


def outermost_objects(text: str, call_key: re.Pattern[str]) -> Iterator[Any]:
    """Yields the outermost JSON objects of a text.

    An object that breaks is yielded as a BrokenValue where it holds a key that calls have
    (`call_key`) before the place where it broke; others are passed over.
    """
    reader = JSONReader(text)
    position = 0
    while not reader.gave_up and (start := _OBJECT_START.search(text, position)):
        value, position = reader.read(start.start())
        if not isinstance(value, BrokenValue) or call_key.search(text, start.start(), position):
            yield value


def tagged_values(text: str, tag: str) -> Iterator[Any]:
    """Yields the JSON value behind each tag; a BrokenValue where there is none."""
    reader = JSONReader(text)
    position = text.find(tag)
    while position >= 0 and not reader.gave_up:
        value, position = reader.read(skip(text, position + len(tag)))
        yield value
        position = text.find(tag, position)


def skip(text: str, start: int, what: re.Pattern[str] = SPACE) -> int:
    """Returns the position behind what matches at `start`; `start` where nothing does."""
    match = what.match(text, start)
    return match.end() if match else start
