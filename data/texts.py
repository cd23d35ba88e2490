"""Makes users' texts ones that everything can print, encode and keep.

Invariant: nothing here raises, whatever it is given: a lone surrogate, which no UTF-8 can hold, or
an exception that cannot say what it is.
"""

from collections.abc import Callable, Mapping
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


def text_of(error: BaseException, show: Callable[[object], str] = str) -> str:
    """Returns what `str(error)`, or repr, says, also where the error's own method for that fails.

    Args:
        show: str or repr.
    """
    try:
        return printable(show(error))
    # Another way to end, such as sys.exit(), would be code of a user's that ends ours.
    except BaseException as broken:
        return f"(its __{show.__name__}__ raised {type(broken).__name__})"
