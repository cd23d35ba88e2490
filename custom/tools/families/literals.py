"""Reads values as Python, JSON or Gemma write them: texts, numbers, words, lists and objects.

Invariant: nothing is evaluated, nothing raises but Unreadable, and the time is linear in the text.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from custom.tools.json_values import skip

# Lists and objects hold each other so deep.
MAX_DEPTH = 50
WORDS = {
    "True": True,
    "False": False,
    "None": None,
    "true": True,
    "false": False,
    "null": None,
}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_WORD = re.compile(r"[A-Za-z_]\w*")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*)?(?:\.\d+)?(?:[eE][+-]?\d+)?")
_ESCAPED = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_QUOTED = {
    '"': re.compile(r'"((?:[^"\\]|\\.)*+)"', re.DOTALL),
    "'": re.compile(r"'((?:[^'\\]|\\.)*+)'", re.DOTALL),
}
_KEY = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*=\s*(?!=)")


class Unreadable(ValueError):
    """Says what cannot be read; `is_cut`: the text ends before the value does."""

    def __init__(self, problem: str, is_cut: bool = False) -> None:
        super().__init__(problem)
        self.is_cut = is_cut


@dataclass
class LiteralReader:
    """Reads values out of a text, from a position on.

    Attributes:
        quotes: what opens and closes a text in which nothing is escaped.
        bare_keys: an object's keys stand without quotes, up to their colon.
    """

    text: str
    quotes: Mapping[str, str] = field(default_factory=dict)
    bare_keys: bool = False
    position: int = 0

    def value(self, depth: int = 0) -> Any:
        """Reads the value that begins here."""
        if depth > MAX_DEPTH:
            raise Unreadable(f"more than {MAX_DEPTH} lists and objects hold each other")
        self._skip()
        for opens, closes in self.quotes.items():
            if self.text.startswith(opens, self.position):
                return self._raw_text(opens, closes)
        first = self.text[self.position : self.position + 1]
        if first in _QUOTED:
            return self._quoted(first)
        if first == "[":
            return self._items(depth)
        if first == "{":
            return self._object(depth)
        return self._word_or_number()

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Reads `a=1, "x")` behind a call's bracket: values without a name, and those by name."""
        unnamed: list[Any] = []
        named: dict[str, Any] = {}
        while not self.takes(")"):
            key = _KEY.match(self.text, self.position)
            if key is not None:
                self.position = key.end()
                named[key[1]] = self.value()
            else:
                unnamed.append(self.value())
            if not self.takes(","):
                self.needs(")")
                break
        return unnamed, named

    def takes(self, what: str) -> bool:
        """Goes behind what stands here, white space aside; returns whether it does."""
        self._skip()
        if not self.text.startswith(what, self.position):
            return False
        self.position += len(what)
        return True

    def needs(self, what: str) -> None:
        """Goes behind what must stand here."""
        if not self.takes(what):
            found = self.text[self.position : self.position + 20]
            raise Unreadable(
                f"{what!r} is missing" + (f" before {found!r}" if found else ""),
                is_cut=not found,
            )

    def _skip(self) -> None:
        self.position = skip(self.text, self.position)

    def _raw_text(self, opens: str, closes: str) -> str:
        start = self.position + len(opens)
        end = self.text.find(closes, start)
        if end < 0:
            raise Unreadable(f"a text is not closed by {closes}", is_cut=True)
        self.position = end + len(closes)
        return self.text[start:end]

    def _quoted(self, quote: str) -> str:
        found = _QUOTED[quote].match(self.text, self.position)
        if found is None:
            raise Unreadable("a text is not closed", is_cut=True)
        self.position = found.end()
        return _ESCAPED.sub(_unescaped, found[1])

    def _items(self, depth: int) -> list[Any]:
        self.needs("[")
        items: list[Any] = []
        while not self.takes("]"):
            items.append(self.value(depth + 1))
            if not self.takes(","):
                self.needs("]")
                break
        return items

    def _object(self, depth: int) -> dict[str, Any]:
        self.needs("{")
        entries: dict[str, Any] = {}
        while not self.takes("}"):
            key = self._bare_key() if self.bare_keys else str(self.value(depth + 1))
            self.needs(":")
            entries[key] = self.value(depth + 1)
            if not self.takes(","):
                self.needs("}")
                break
        return entries

    def _bare_key(self) -> str:
        """Reads a key without quotes, or in them."""
        self._skip()
        for opens, closes in self.quotes.items():
            if self.text.startswith(opens, self.position):
                return self._raw_text(opens, closes)
        end = re.compile(r"[^:{}\[\],]*").match(self.text, self.position)
        assert end is not None
        if end.end() >= len(self.text):
            raise Unreadable("a name has no value", is_cut=True)
        self.position = end.end()
        return end.group().strip().strip("\"'")

    def _word_or_number(self) -> Any:
        word = _WORD.match(self.text, self.position)
        if word is not None and word.group() in WORDS:
            self.position = word.end()
            return WORDS[word.group()]
        number = _NUMBER.match(self.text, self.position)
        if number is not None and number.group().strip("+-"):
            self.position = number.end()
            try:
                return json.loads(number.group().replace("_", "").lstrip("+"))
            except ValueError:
                raise Unreadable(f"{number.group()[:20]!r} is no number") from None
        found = self.text[self.position : self.position + 20]
        if not found:
            raise Unreadable("a value is missing", is_cut=True)
        raise Unreadable(f"no value begins at {found!r}")


def _unescaped(escaped: re.Match[str]) -> str:
    what = escaped[1]
    if len(what) > 1:
        return chr(int(what[1:], 16))
    return ESCAPES.get(what, what if what in "\\'\"/`" else escaped.group())
