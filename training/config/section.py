"""What every section of the configuration is made of."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base of every section: fields by name, for estimators and losses written for verl (`config.get("gamma", 1.0)`).

    Code of this project writes `config.gamma`, which a type checker can follow.
    """

    def get(self, name: str, default: Any = None) -> Any:
        """The field, or `default` where the section has none of that name."""
        return self[name] if name in {item.name for item in fields(self)} else default

    def __getitem__(self, name: str) -> Any:
        """The field; KeyError with the names there are."""
        names = [item.name for item in fields(self)]
        if name not in names:
            raise KeyError(f"{type(self).__name__} has no {name!r}; it has: {', '.join(names)}")
        return getattr(self, name)


@dataclass(frozen=True, kw_only=True)
class CustomClassConfig(Section):
    """A class of your own from a Python file."""

    path: str | None = None  #: Python file; null = the built-in class
    name: str | None = None  #: name of the class in that file


@dataclass(frozen=True)
class Leaf:
    """One setting: its type, its value and its line of documentation."""

    kind: Any
    value: Any
    doc: str


def leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Leaf]]:
    """(dotted key, Leaf) for every setting of a config section, in the order of the dataclasses."""
    section_type: Any = type(section)
    kinds, docs = get_type_hints(section_type), field_docs(section_type)
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, Leaf(kinds[item.name], value, docs[item.name])


@cache
def field_docs(section_type: type) -> dict[str, str]:
    """Field name -> the text after `#:` in the source."""
    return dict(re.findall(r"^    (\w+): .*  #: (.+)$", inspect.getsource(section_type), re.MULTILINE))
