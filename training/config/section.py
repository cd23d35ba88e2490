"""Defines what a section of the configuration is, and the types that bound its fields.

When a section is made, pydantic checks each value against its type and what `Annotated` says of
it: a field of type `Fraction` refuses 1.5 by itself. Contradictions of several fields stand in
the section's method `problems`. A section never changes once it is made.
"""

import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, dataclass_transform

from annotated_types import Ge, Gt, Le, Lt, Predicate
from pydantic import AfterValidator, BeforeValidator, ConfigDict, ValidationInfo
from pydantic.dataclasses import dataclass

from data.names import did_you_mean

# verl's paths of files may begin with this.
PACKAGE_PREFIX = "pkg://"
FILE_PREFIX = "file://"
PROJECT_ROOT = Path(__file__).resolve().parents[2]
# Why paths are read, given to pydantic as its context: to find them from any folder, or to make
# them absolute, so that they hold wherever the run goes.
FINDING = "finding"
ANCHORING = "anchoring"


def located(path: str) -> str:
    """Finds a path from the current folder, else inside the project.

    What is in neither place is returned as it is: it may name a model of the hub. ~ and $NAME are
    read as a shell reads them, which does not see those in a YAML file or in quotes. verl's
    pkg://a.b names the file a/b.py beside what Python imports, and file://a.py the file a.py.
    """
    if path.startswith(PACKAGE_PREFIX):
        file = path.removeprefix(PACKAGE_PREFIX).replace(".", "/") + ".py"
        places = [Path(folder, file) for folder in ("", str(PROJECT_ROOT), *sys.path)]
    else:
        file = path.removeprefix(FILE_PREFIX)
        places = [Path(_expanded(file)), PROJECT_ROOT / file]
    for place in places:
        if place.exists():
            return str(place)
    return path


def _expanded(path: str) -> str:
    """Puts folders in the place of a beginning ~ and of $NAME; what has no value stays."""
    return os.path.expanduser(os.path.expandvars(path))


def _read_input_path(path: str, info: ValidationInfo) -> str:
    """Finds a file or folder that is read; makes it absolute where the config is anchored."""
    if not path or not info.context:
        return path
    place = located(path)
    if info.context == ANCHORING and os.path.exists(place):
        return os.path.abspath(place)
    return place


def _read_tool_name(name: str, info: ValidationInfo) -> str:
    """Reads what has a dot as a path; the others are names, which a folder here may have too."""
    if "." not in name:
        return name
    return _read_input_path(name, info)


def _read_object_name(name: str, info: ValidationInfo) -> str:
    """Reads FILE.py:NAME, whose file is a path."""
    path, colon, name_in_file = name.rpartition(":")
    return _read_input_path(path, info) + colon + name_in_file


def _read_parser_name(name: str) -> str:
    """Requires the name of a parser that there is, or of one of vLLM's."""
    if name in ("auto", "function") or name.startswith("vllm:"):
        return name
    from custom.tools.parsers import parser_names

    names = ["auto", *parser_names()]
    if name not in names:
        raise ValueError(
            f"is no parser; allowed: {', '.join(names)}, vllm:NAME.{did_you_mean(name, names)}"
        )
    return name


def _split_command(command: Any) -> Any:
    """Splits a command that is one text into its words, as a shell does."""
    return tuple(shlex.split(command)) if isinstance(command, str) else command


def _read_command(words: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
    """Reads the words that name Python files as paths."""
    return tuple(_read_input_path(word, info) if word.endswith(".py") else word for word in words)


def _read_output_path(path: str, info: ValidationInfo) -> str:
    """Reads ~ and $NAME in a path that is written to; makes it absolute in an anchored config."""
    if not path or not info.context:
        return path
    place = _expanded(path)
    return os.path.abspath(place) if info.context == ANCHORING else place


def _read_threshold(value: Any) -> Any:
    """Writes a number as text; what is no number is left to the check of its type."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return value


PositiveInt = Annotated[int, Gt(0)]
# Turns are numbered in 16 bits.
TurnCount = Annotated[int, Ge(1), Le(32767)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
PositiveFraction = Annotated[float, Gt(0), Le(1)]
# The only whole number that is not true is 0.
PositiveOrMinusOne = Annotated[int, Ge(-1), Predicate(bool)]
NonNegativeOrMinusOne = Annotated[int, Ge(-1)]
AboveOne = Annotated[float, Gt(1)]
Betas = tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]]
# One number, UPPER, or two, LOWER_UPPER; kept as text, as the second form is.
Threshold = Annotated[str, BeforeValidator(_read_threshold)]
InputPath = Annotated[str, AfterValidator(_read_input_path)]
ToolName = Annotated[str, AfterValidator(_read_tool_name)]
ParserName = Annotated[str, AfterValidator(_read_parser_name)]
# FILE.py:NAME.
ObjectName = Annotated[str, AfterValidator(_read_object_name)]
# The words of a command, or one text of them.
Command = Annotated[tuple[str, ...], BeforeValidator(_split_command), AfterValidator(_read_command)]
OutputPath = Annotated[str, AfterValidator(_read_output_path)]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True)
class Section:
    """Makes every class that derives from it a frozen dataclass with keyword-only, checked fields.

    A setting is one line with its type, its default and, after `#:`, its documentation. A check of
    what fields say together is an `if` in `problems`:

        class Smoothing(Section):
            enable: bool = False  #: smooth the curve
            window: PositiveInt = 1  #: steps to average over, 2 or more with enable

            def problems(self) -> Iterator[str]:
                if self.enable and self.window == 1:
                    yield f"smoothing.window={self.window} smooths nothing: make it 2 or more"

    What a run does without, as a setting that nothing reads, is a sentence of `warnings`.

    Fields are also had by name, for estimators and losses written for verl (`config.get("gamma",
    1.0)`). Code of this project writes `config.gamma`, which a type checker can follow.
    """

    def __init_subclass__(cls) -> None:
        make_dataclass = dataclass(
            frozen=True,
            kw_only=True,
            config=ConfigDict(allow_inf_nan=False, extra="forbid"),
        )
        make_dataclass(cls)

    def problems(self) -> Iterator[str]:
        """Yields a sentence for each combination of this section's fields that cannot run.

        It raises nothing, so that all problems are reported together. What another section
        contradicts is in training/config/cross_checks, and files, models and ranks are looked at in
        training/config/resources. A sentence names key, value and fix.
        """
        yield from ()

    def warnings(self) -> Iterator[str]:
        """Yields a sentence for each setting of this section that runs, but hardly as it was meant.

        That is one which nothing reads, or which leaves the run without a protection. A value at
        its default is none, as nobody may have given it.
        """
        yield from ()

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the field, else that entry of the section's custom_kwargs, else `default`."""
        try:
            return self[name]
        except KeyError:
            return default

    def __getitem__(self, name: str) -> Any:
        """Returns the field, else that entry of custom_kwargs; raises KeyError without either."""
        fields = vars(self)
        if name in fields:
            return fields[name]
        return fields.get("custom_kwargs", {})[name]
