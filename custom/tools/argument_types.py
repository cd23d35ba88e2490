"""Gives arguments that were written without types the types of the tool's schema.

    <parameter=count>3</parameter>    3 where the schema has an integer, "3" where it has a string
    <arg_value>null</arg_value>       None where the schema allows null, "null" where it does not

Invariant: only a WrittenValue is changed, and into nothing but what its own text says; what does
not fit stays the text, which the check against the schema then refuses in words.
"""

import json
from collections.abc import Mapping
from typing import Any

from custom.tools.calls import WrittenValue

# References and alternatives of a schema are followed so deep.
MAX_DEPTH = 8
NULLS = ("null", "None")
BOOLEANS = {"true": True, "True": True, "false": False, "False": False}


def with_types(arguments: dict[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call with the types of a tool's schema."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        properties = {}
    typed = {}
    for name, value in arguments.items():
        typed[name] = value
        if isinstance(value, WrittenValue):
            typed[name] = typed_value(value, kinds_of(properties.get(name), schema))
    return typed


def kinds_of(declared: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Returns the names of the types that a part of a schema allows; none where it allows any."""
    if not isinstance(declared, Mapping) or depth > MAX_DEPTH:
        return frozenset()
    kinds: set[str] = set()
    types = declared.get("type", ())
    kinds.update([types] if isinstance(types, str) else types)
    if not kinds and isinstance(declared.get("enum"), list):
        kinds.update(map(kind_of, declared["enum"]))
    if not kinds and "const" in declared:
        kinds.add(kind_of(declared["const"]))
    for key in ("anyOf", "oneOf", "allOf"):
        alternatives = declared.get(key)
        if kinds or not isinstance(alternatives, list):
            continue
        found = [kinds_of(each, root, depth + 1) for each in alternatives]
        if key == "allOf":
            found = [each for each in found if each]
        if all(found):
            kinds.update(*found)
    if not kinds and isinstance(declared.get("$ref"), str):
        return kinds_of(_referenced(declared["$ref"], root), root, depth + 1)
    return frozenset(kinds)


def _referenced(reference: str, root: Mapping[str, Any]) -> Any:
    """Returns the part of a schema that `#/$defs/NAME` names; None where there is none."""
    part: Any = root
    if not reference.startswith("#/"):
        return None
    for key in reference[2:].split("/"):
        if not isinstance(part, Mapping):
            return None
        part = part.get(key)
    return part


def kind_of(value: Any) -> str:
    """Returns the name that JSON schema has for a value's type."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def typed_value(text: str, kinds: frozenset[str]) -> Any:
    """Returns what a text stands for, where these types are allowed; none: any type is.

    A text that may be a string, or something else, is something else where it reads as that.
    """
    as_text = str(text)
    if kinds == {"string"}:
        return as_text
    stripped = as_text.strip()
    if stripped in NULLS and (not kinds or "null" in kinds):
        return None
    if stripped in BOOLEANS and (not kinds or "boolean" in kinds):
        return BOOLEANS[stripped]
    try:
        value = json.loads(stripped)
    except (ValueError, RecursionError):
        return as_text
    if isinstance(value, str) and (not kinds or "string" in kinds):
        # It was written with its quotes.
        return as_text
    kind = kind_of(value)
    fits = not kinds or kind in kinds or (kind == "integer" and "number" in kinds)
    # A schema's integer may be written 3.0.
    is_whole = kind == "number" and "integer" in kinds and value == int_or_none(value)
    return value if fits or is_whole else as_text


def int_or_none(value: float) -> int | None:
    """Returns the whole number that a number is; None for infinity and what is no number."""
    try:
        return int(value)
    except (ValueError, OverflowError):
        return None
