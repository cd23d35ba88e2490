"""Puts an episode's task into the words of a command.

    mini --task {task.question}    the row's field; what is no text as JSON
    my_agent {task}                the whole row, as JSON

Invariant: a task stays within its word, whatever is in it; nothing reads it as more words.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

PLACE = re.compile(r"\{task(?:\.([^{}]+))?\}")
# A longer word no process may be given.
MAX_WORD_BYTES = 100_000


class NoSuchWord(ValueError):
    """Reports a task that cannot be put into a command."""


def with_task(command: Sequence[str], task: str) -> list[str]:
    """Returns a command's words with the task in them. Raises NoSuchWord.

    Args:
        task: as JSON text.
    """
    row: Any = json.loads(task)
    words = []
    for word in command:
        filled = PLACE.sub(lambda found: _value(row, found[1]), word)
        size = len(filled.encode("utf-8", "replace"))
        if "\0" in filled:
            raise NoSuchWord(f"{word}: the task holds the character NUL, which no word may have")
        if filled != word and size > MAX_WORD_BYTES:
            raise NoSuchWord(
                f"{word}: the task has {size} bytes, and a word may have {MAX_WORD_BYTES}: read it "
                "from standard input"
            )
        words.append(filled)
    return words


def _value(row: Any, name: str | None) -> str:
    """Returns what stands at a place: a field of the row as text, or all of it."""
    if name is None:
        return json.dumps(row)
    if name not in row:
        fields = ", ".join(map(str, row)) or "none"
        raise NoSuchWord(f"{{task.{name}}}: the task has no field {name!r}; it has {fields}")
    value = row[name]
    return value if isinstance(value, str) else json.dumps(value)
