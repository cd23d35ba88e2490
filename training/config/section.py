"""Defines what the sections of the configuration are made of, and how their values are read from text and written.

When a section is made, pydantic checks each value against its type and what `Annotated` says of it. A section and the
table {dotted key: setting} hold the same: `build(type(section)(), {key: leaf.value for key, leaf in leaves(section)})`
equals the section. A word keeps its spelling until the type of its field is known, so that run 007 is not run 7.
"""

import inspect
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, field
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NamedTuple, dataclass_transform, get_args, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, Predicate
from omegaconf import OmegaConf
from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationInfo
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

from data.texts import did_you_mean, table

SAID: dict[str, str] = table(__file__)
PROJECT_ROOT = Path(__file__).resolve().parents[2]
# Why paths are read, given to pydantic as its context: to find them from any folder, or to keep them wherever a run is.
FINDING, ANCHORING = "finding", "anchoring"


def located(path: str) -> str:
    """Returns the path itself where it exists, seen from the current folder; else inside the project if it is there.

    What is in neither place stays as it is: it may name a model of the hub.
    """
    return next((str(place) for place in (Path(path).expanduser(), PROJECT_ROOT / path) if place.exists()), path)


def _input(path: str, info: ValidationInfo) -> str:
    found = located(path) if info.context and path else path
    return os.path.abspath(found) if info.context == ANCHORING and os.path.exists(found) else found


def _tool(name: str, info: ValidationInfo) -> str:
    """Takes what has a dot for a path; the others are names, which a folder here may have too."""
    return _input(name, info) if "." in name else name


def _output(path: str, info: ValidationInfo) -> str:
    return os.path.abspath(path) if info.context == ANCHORING and path else path


PositiveInt = Annotated[int, Gt(0)]
# Turns are numbered in 16 bits.
TurnCount = Annotated[int, Ge(1), Le(32767)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
PositiveFraction = Annotated[float, Gt(0), Le(1)]
# Of whole numbers 0 alone is not true.
PositiveOrMinusOne = Annotated[int, Ge(-1), Predicate(bool)]
NonNegativeOrMinusOne = Annotated[int, Ge(-1)]
AboveOne = Annotated[float, Gt(1)]
Betas = tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]]
InputPath = Annotated[str, AfterValidator(_input)]
ToolName = Annotated[str, AfterValidator(_tool)]
OutputPath = Annotated[str, AfterValidator(_output)]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True)
class Section:
    """Makes every class that derives from it a frozen dataclass with keyword-only fields, which checks their values.

    Fields are also had by name, for estimators and losses written for verl (`config.get("gamma", 1.0)`). Code of this
    project writes `config.gamma`, which a type checker can follow.
    """

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True, config=ConfigDict(allow_inf_nan=False, extra="forbid"))(cls)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the field, or `default` where the section has none of that name."""
        return vars(self).get(name, default)

    def __getitem__(self, name: str) -> Any:
        """Returns the field; raises KeyError where there is none."""
        return vars(self)[name]


class CustomClassConfig(Section):
    """A class of your own from a Python file."""

    path: InputPath | None = None  #: Python file; null = the built-in class
    name: str | None = None  #: name of the class in that file


class Leaf(NamedTuple):
    """Describes one setting: its type with its bounds, its value, and its line of documentation."""

    kind: Any
    value: Any
    doc: str

    @property
    def takes_null(self) -> bool:
        """Says whether null is a value of the setting."""
        return NoneType in get_args(self.kind)

    @property
    def plain(self) -> Any:
        """Returns the type without null, bounds and parameters: int, str, tuple, dict, Literal."""
        kind = get_args(self.kind)[0] if self.takes_null else self.kind
        return getattr(kind, "__origin__", kind)


def leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yields (dotted key, Leaf) for every setting of a config section, in the order of the dataclasses."""
    section_type: Any = type(section)
    kinds, docs = get_type_hints(section_type, include_extras=True), field_docs(section_type)
    for name, value in vars(section).items():
        if isinstance(value, Section):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, Leaf(kinds[name], value, docs[name])


def build(section: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Returns the section with these values of dotted keys in the place of its own."""
    made = {}
    for name, value in vars(section).items():
        key = prefix + name
        made[name] = build(value, values, f"{key}.") if isinstance(value, Section) else values.get(key, value)
    return type(section)(**made)


def anchored(section: Any) -> Any:
    """Returns the section with the paths in it absolute, so that a later os.chdir moves nothing."""
    return TypeAdapter(type(section)).validate_python(asdict(section), context=ANCHORING)


@cache
def field_docs(section_type: type) -> dict[str, str]:
    """Reads the text after `#:`, behind a field or on the line above it, from a section's source, by field name."""
    pattern = r"^    (?:#: (.+)\n    (\w+): .*|(\w+): .*  #: (.+))$"
    sources = "".join(inspect.getsource(kind) for kind in reversed(section_type.__mro__[:-1]))
    found = re.findall(pattern, sources, re.MULTILINE)
    return {above or behind: doc_above or doc_behind for doc_above, above, behind, doc_behind in found}


def parse(text: str, *, as_yaml: bool = False) -> Any:
    """Returns an override's value: null, lists, mappings and quoted text as in YAML, all else as plain text."""
    if text in ("null", "~"):
        return None
    if text[:1] == "{":
        # Hydra writes {key:value} without a blank.
        text = re.sub(r"([{,]\s*\w+):(?=[^\s/])", r"\1: ", text)
    if not as_yaml and text[:1] not in ("[", "{", '"', "'"):
        return text
    return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]


def convert(value: Any, leaf: Leaf) -> Any:
    """Returns a YAML value or an override's text as a setting takes it; else raises pydantic's ValidationError."""
    kind = leaf.plain
    if isinstance(value, str) and leaf.takes_null and value.lower() in ("null", "none", ""):
        return None
    if isinstance(value, str) and kind is bool:
        value = {"true": True, "false": False}.get(value.lower(), value)
    elif isinstance(value, str) and kind is int and re.fullmatch(r"\d+(\.\d+)?[eE]\d+", value):
        value = float(value)
    elif isinstance(value, str) and kind is tuple and value.lstrip().startswith("["):
        value = parse(value.strip(), as_yaml=True)
    # To pydantic truth is a number.
    elif isinstance(value, bool) and kind in (int, float):
        value = str(value)
    if kind is tuple and not isinstance(value, list | tuple):
        value = [] if value in (None, "") else [value]
    adapter = TypeAdapter(leaf.kind, config=ConfigDict(strict=kind is bool, allow_inf_nan=False))
    return adapter.validate_python(value, context=FINDING)


def fault_at(fault: ErrorDetails) -> str:
    """Names the place within a value at which pydantic found a fault, as in [0].kwargs."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"])


def said_of(fault: ErrorDetails, leaf: Leaf) -> str:
    """Says what a value must be, and the nearest of the words or keys that there are."""
    facts, given = fault.get("ctx", {}), str(fault["input"])
    text = SAID.get(fault["type"], fault["msg"]).format(**facts)
    known: Any = re.findall(r"'(.+?)'", facts.get("expected", ""))
    if fault["type"] == "unexpected_keyword_argument":
        given, known = str(fault["loc"][-1]), get_args(leaf.kind)[0].__dataclass_fields__
    near = " The Megatron backend is not there" if given == "megatron" else did_you_mean(given, known)
    return text + (" (or null)" if leaf.takes_null else "") + (near and f".{near}")


def as_text(value: Any) -> str:
    """Writes a value as one would in a YAML file or an override."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_/][\w./+-]*", value) and value.lower() not in ("null", "none"):
        return value
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(as_text, value))}]"
    return json.dumps(value, default=vars)
