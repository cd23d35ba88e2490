"""Defines what the sections of the configuration are made of: a base class, types with bounds, and a flat table.

A type says with `Annotated` what its values must keep to. A section and the table {dotted key: setting} hold the same:
`build(type(section), {key: leaf.value for key, leaf in leaves(section)})` equals the section.
"""

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from itertools import chain
from typing import Annotated, Any, NamedTuple, dataclass_transform, get_args, get_type_hints


class Rule(NamedTuple):
    """States what a value must keep to; `wanted` is what an error says after "must be"."""

    holds: Callable[[Any], bool]
    wanted: str


ABOVE_0 = Rule(lambda value: value > 0, "above 0")
FROM_0 = Rule(lambda value: value >= 0, "0 or more")
FROM_1 = Rule(lambda value: value >= 1, "1 or more")
UP_TO_1 = Rule(lambda value: value <= 1, "at most 1")
PositiveInt = Annotated[int, ABOVE_0]
# Turns are numbered in 16 bits.
TurnCount = Annotated[int, FROM_1, Rule(lambda value: value <= 32767, "at most 32767")]
PositiveFloat = Annotated[float, ABOVE_0]
NonNegativeInt = Annotated[int, FROM_0]
NonNegativeFloat = Annotated[float, FROM_0]
Fraction = Annotated[float, FROM_0, UP_TO_1]
PositiveFraction = Annotated[float, ABOVE_0, UP_TO_1]
PositiveOrMinusOne = Annotated[int, Rule(lambda value: value >= 1 or value == -1, "1 or more, or -1")]
NonNegativeOrMinusOne = Annotated[int, Rule(lambda value: value >= -1, "0 or more, or -1")]
AboveOne = Annotated[float, Rule(lambda value: value > 1, "above 1")]
Betas = Annotated[tuple[float, float], Rule(lambda betas: all(0 <= beta < 1 for beta in betas), "in [0, 1)")]

# Marks a path that is looked for in the project's folder too, so that a run starts from any folder.
INPUT = "input"
InputPath = Annotated[str, INPUT]
# Marks a folder that a run writes to.
OUTPUT = "output"
OutputPath = Annotated[str, OUTPUT]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True)
class Section:
    """Makes every class that derives from it a frozen dataclass with keyword-only fields.

    Fields are also had by name, for estimators and losses written for verl (`config.get("gamma", 1.0)`). Code of this
    project writes `config.gamma`, which a type checker can follow.
    """

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the field, or `default` where the section has none of that name."""
        return vars(self).get(name, default)

    def __getitem__(self, name: str) -> Any:
        """Returns the field; raises KeyError with the names there are."""
        if name not in vars(self):
            raise KeyError(f"{type(self).__name__} has no {name!r}; it has: {', '.join(vars(self))}")
        return vars(self)[name]


class CustomClassConfig(Section):
    """A class of your own from a Python file."""

    path: InputPath | None = None  #: Python file; null = the built-in class
    name: str | None = None  #: name of the class in that file


class Leaf(NamedTuple):
    """Describes one setting: its plain type, its value, its line of documentation, and what `Annotated` says of it."""

    kind: Any
    value: Any
    doc: str
    metadata: tuple[Any, ...]

    def wanted(self) -> Iterator[str]:
        """Says what the value must be, for each bound that it breaks; null breaks none."""
        rules = (rule for rule in self.metadata if isinstance(rule, Rule) and self.value is not None)
        return (rule.wanted for rule in rules if not rule.holds(self.value))


def leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yields (dotted key, Leaf) for every setting of a config section, in the order of the dataclasses."""
    section_type: Any = type(section)
    plain, annotated = get_type_hints(section_type), get_type_hints(section_type, include_extras=True)
    docs = field_docs(section_type)
    for name, kind in plain.items():
        value = getattr(section, name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            # Of `X | None` and of a tuple of X too.
            said = [getattr(part, "__metadata__", ()) for part in (annotated[name], *get_args(annotated[name]))]
            yield prefix + name, Leaf(kind, value, docs[name], tuple(chain(*said)))


def build(section_type: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Makes a section of the values of its dotted keys."""
    made = {}
    for name, kind in get_type_hints(section_type).items():
        made[name] = build(kind, values, f"{prefix}{name}.") if is_dataclass(kind) else values[prefix + name]
    return section_type(**made)


def anchored(section: Any) -> Any:
    """Returns the section with the paths in it absolute, so that a later os.chdir moves nothing.

    What is looked for stays as it is where it is no file or folder: it may name a model of the hub.
    """
    values: dict[str, Any] = {}
    for key, leaf in leaves(section):
        anchor = _existing if INPUT in leaf.metadata else os.path.abspath if OUTPUT in leaf.metadata else _as_is
        values[key] = each(anchor, leaf.value)
    return build(type(section), values)


def each(change: Callable[[Any], Any], value: Any) -> Any:
    """Changes a value, or each of several in a tuple; what is null or empty stays."""
    return tuple(map(change, value)) if isinstance(value, tuple) else value and change(value)


def _existing(path: Any) -> Any:
    return os.path.abspath(path) if os.path.exists(path) else path


def _as_is(value: Any) -> Any:
    # An entry of env_template names its file too.
    return value | {"path": _existing(value["path"])} if isinstance(value, dict) and value.get("path") else value


@cache
def field_docs(section_type: type) -> dict[str, str]:
    """Reads the text after `#:`, behind a field or on the line above it, from a section's source, by field name."""
    pattern = r"^    (?:#: (.+)\n    (\w+): .*|(\w+): .*  #: (.+))$"
    sources = "".join(inspect.getsource(kind) for kind in reversed(section_type.__mro__[:-1]))
    found = re.findall(pattern, sources, re.MULTILINE)
    return {above or behind: doc_above or doc_behind for doc_above, above, behind, doc_behind in found}
