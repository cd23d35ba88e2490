"""Reads values from text, converts them to the types of their fields, and writes them as text again.

What is written as YAML loads to an equal config. A word keeps its spelling until the type of its field is known, so
that run 007 is not run 7.
"""

import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from decimal import Decimal, InvalidOperation
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml
from omegaconf import OmegaConf

from data.texts import did_you_mean
from training.config.section import leaves
from training.config.settings import PPOConfig


class InputError(ValueError):
    """Says what is wrong with what a user gave; the caller knows where it was given."""


def parse(text: str, *, as_yaml: bool = False) -> Any:
    """Returns an override's value: null, lists, mappings and quoted text as in YAML, all else as plain text."""
    if text in ("null", "~"):
        return None
    if text[:1] == "{":
        # Hydra writes {key:value} without a blank.
        text = re.sub(r"([{,]\s*\w+):(?=[^\s/])", r"\1: ", text)
    if not as_yaml and text[:1] not in ("[", "{", '"', "'"):
        return text
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]
    except yaml.YAMLError as error:
        raise InputError(f"{str(error).splitlines()[0]}; check brackets and quotes") from None


def convert(value: Any, kind: Any) -> Any:
    """Returns a YAML value or an override's text as the type of a field; InputError says what would be allowed."""
    origin, args = get_origin(kind), get_args(kind)
    if NoneType in args:
        if value is None or (isinstance(value, str) and value.lower() in ("null", "none", "")):
            return None
        try:
            return convert(value, args[0])
        except InputError as error:
            raise InputError(f"{error} (or null)") from None
    if origin is dict and not isinstance(value, dict):
        raise InputError("must be a mapping, as in {key: value}")
    if origin is Literal:
        return _choice(value, args)
    if origin is tuple:
        return _sequence(value, args)
    return value if origin is dict else _scalar(value, kind)


def _scalar(value: Any, kind: type) -> Any:
    """Returns text, a truth value or a finite number."""
    if kind is str and isinstance(value, str):
        return value
    if kind is bool and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if kind in (int, float) and isinstance(value, int | float | str) and not isinstance(value, bool):
        # Exact, so that no digit of a long seed is lost.
        with suppress(InvalidOperation, ValueError):
            number = Decimal(str(value))
            if math.isfinite(float(number)) and (kind is float or number == int(number)):
                return kind(number)
    expected = {str: "text; put it in quotes", bool: "true or false", int: "a whole number", float: "a finite number"}
    raise InputError(f"must be {expected[kind]}")


def _choice(value: Any, allowed: tuple[str, ...]) -> str:
    """Returns one of the allowed words."""
    if value in allowed:
        return str(value)
    missing = " The Megatron backend is not there" if value == "megatron" else did_you_mean(str(value), allowed)
    raise InputError(f"must be one of {', '.join(allowed)}.{missing}")


def _sequence(value: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns a list, or one item without brackets, as a tuple; `args` is (item type, ...) or one type per place."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse(value.strip())
    items = list(value) if isinstance(value, list | tuple) else [] if value in (None, "") else [value]
    kinds = [args[0]] * len(items) if args[-1] is Ellipsis else args
    if len(items) != len(kinds):
        raise InputError(f"must be a list of {len(kinds)} values")
    return tuple(convert(item, kind) for item, kind in zip(items, kinds, strict=True))


def as_text(value: Any) -> str:
    """Writes a value as one would in a YAML file or an override."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_/][\w./+-]*", value) and value.lower() not in ("null", "none"):
        return value
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(as_text, value))}]"
    return json.dumps(value)


def to_yaml(config: PPOConfig) -> str:
    """Writes the whole config as YAML; loading it again gives an equal config."""
    return str(OmegaConf.to_yaml(OmegaConf.create(asdict(config))))


def reference_yaml() -> str:
    """Writes configs/ppo_trainer.yaml: every key with its default, its choices and its documentation."""
    lines = ["# Every key with its default: python -m training.config.loader --reference > configs/ppo_trainer.yaml"]
    return "\n".join([*lines, *_reference_lines(PPOConfig(), "")]) + "\n"


def _reference_lines(section: Any, indent: str) -> Iterator[str]:
    """Writes a section's keys, one a line, its inner sections indented."""
    own = dict(leaves(section))
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            yield f"{indent}{item.name}:  # {(type(value).__doc__ or '').splitlines()[0]}"
            yield from _reference_lines(value, indent + "  ")
        else:
            yield f"{indent}{item.name}: {as_text(value)}  # {own[item.name].doc}{_choices(own[item.name].kind)}"


def _choices(kind: Any) -> str:
    """Lists the words that a field takes, where it takes only some."""
    words = next((get_args(part) for part in (kind, *get_args(kind)) if get_origin(part) is Literal), ())
    return f" ({' | '.join(words)})" if words else ""
