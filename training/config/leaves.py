"""Walks over the settings of a configuration: sections as a flat table, and the table as sections.

A section and the table {dotted key: setting} hold the same: with the values of `leaves(section)`,
`build(type(section)(), values)` equals the section.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

from pydantic import TypeAdapter

from training.config.section import ANCHORING, Section


@dataclass(frozen=True)
class Leaf:
    """Describes one setting: its type with its bounds, its value, and its line of documentation."""

    kind: Any
    value: Any
    doc: str

    @property
    def takes_null(self) -> bool:
        """Returns whether null is a value of the setting."""
        return NoneType in get_args(self.kind)

    @property
    def plain(self) -> Any:
        """Returns the type without null, bounds and parameters: int, str, tuple, dict, Literal."""
        kind = self._without_null
        return getattr(kind, "__origin__", kind)

    @property
    def words(self) -> tuple[Any, ...]:
        """Returns the values that a Literal allows beside null; of other types nothing."""
        return get_args(self._without_null) if self.plain is Literal else ()

    @property
    def _without_null(self) -> Any:
        return get_args(self.kind)[0] if self.takes_null else self.kind


def leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yields (dotted key, Leaf) for every setting of a section, in the order of its fields."""
    section_type: Any = type(section)
    kinds = get_type_hints(section_type, include_extras=True)
    docs = field_docs(section_type)
    for name, value in vars(section).items():
        if isinstance(value, Section):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, Leaf(kind=kinds[name], value=value, doc=docs.get(name, ""))


def sections(section: Section) -> Iterator[Section]:
    """Yields every section inside a section, and then the section itself."""
    for value in vars(section).values():
        if isinstance(value, Section):
            yield from sections(value)
    yield section


def build(section: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Returns a copy of the section with the values of these dotted keys in it."""
    fields = {}
    for name, value in vars(section).items():
        key = prefix + name
        if isinstance(value, Section):
            fields[name] = build(value, values, f"{key}.")
        else:
            fields[name] = values.get(key, value)
    return type(section)(**fields)


def anchored(section: Any) -> Any:
    """Returns the section with the paths in it absolute, so that a later os.chdir moves nothing."""
    return TypeAdapter(type(section)).validate_python(asdict(section), context=ANCHORING)


@cache
def field_docs(section_type: type) -> dict[str, str]:
    """Reads the documentation of a section's fields from its source, by field name.

    It is the text after `#:` behind the field, or that of the lines above it, joined to one line.
    """
    docs: dict[str, str] = {}
    for kind in reversed(section_type.__mro__[:-1]):
        # The class of all settings is made, and has sections alone.
        if kind.__name__ == "PPOConfig":
            continue
        docs |= _docs_in_source(textwrap.dedent(inspect.getsource(kind)))
    return docs


def _docs_in_source(source: str) -> dict[str, str]:
    """Reads the documentation of the fields in the source of one class."""
    lines = source.splitlines()
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement in definition.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        # Line numbers count from 1; the comment block above ends where no line is a `#:` one.
        first = statement.lineno - 1
        while lines[first - 1].lstrip().startswith("#: "):
            first -= 1
        comments = re.findall(r"#: (.+)", "\n".join(lines[first : statement.end_lineno]))
        if comments:
            docs[statement.target.id] = " ".join(comment.strip() for comment in comments)
    return docs
