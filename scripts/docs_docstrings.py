"""Makes the project's docstrings what the API reference's parser expects; griffe loads this file.

    Args:                            Args:
        values: (batch,).                values: (batch,).
    Returns: (batch,) float32.
                                     Returns:
                                         (batch,) float32.

Invariant: only blank lines and line breaks change, no word.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

SECTIONS = "Args|Returns|Yields|Raises|Attributes"
# A section that follows a line of text, and one whose text stands in its own line.
WITHOUT_BLANK = re.compile(rf"(?m)(?<=\S)\n(?=[ ]*(?:{SECTIONS}):)")
IN_ONE_LINE = re.compile(rf"(?m)^([ ]*)({SECTIONS}): (?=\S)")


def readable(docstring: str) -> str:
    """Returns a docstring in which each section has a line and a blank line before it."""
    return IN_ONE_LINE.sub(r"\1\2:\n\1    ", WITHOUT_BLANK.sub("\n\n", docstring))


class ReadableDocstrings(Extension):
    """Changes docstrings as griffe collects them."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Changes the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = readable(obj.docstring.value)
