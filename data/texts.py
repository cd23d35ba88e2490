"""Makes users' texts ones that everything can print, encode and keep.

Invariant: nothing here raises, whatever it is given: a lone surrogate, which no UTF-8 can hold, or
an exception that cannot say what it is.
"""

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")


def printable(text: str) -> str:
    """Replaces each lone surrogate by a question mark; "score\\ud800" -> "score?"."""
    if text.isascii():
        # The text may be of a subclass, such as numpy's strings.
        return str(text)
    return text.encode("utf-8", "replace").decode("utf-8")


def with_printable_names(values: Mapping[str, Value]) -> dict[str, Value]:
    """Returns the entries, their names printable; of names that become the same the last counts."""
    return {printable(str(name)): value for name, value in values.items()}


def text_of(error: BaseException) -> str:
    """Returns what `str(error)` says, also where the error's own __str__ fails or gives no text."""
    try:
        return printable(str(error))
    # Another way to end, such as sys.exit(), would be code of a user's that ends ours.
    except BaseException as broken:
        return f"(its __str__ raised {type(broken).__name__})"
