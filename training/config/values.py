"""Reads the values of settings from text and writes them; tells what is wrong with a value.

A word keeps its spelling until the type of its field is known, so that run 007 is not run 7.
"""

import json
import re
from typing import Any, get_args

from omegaconf import OmegaConf
from pydantic import ConfigDict, TypeAdapter
from pydantic_core import ErrorDetails

from data.names import did_you_mean
from training.config.leaves import Leaf
from training.config.section import FINDING

# The values that are allowed, by the type of pydantic's error, which brings the facts in braces.
FAULT_SENTENCES = {
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be {ge:g} or more",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "predicate_failed": "must be -1, or 1 or more",
    "finite_number": "must be a finite number",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a smaller number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a finite number",
    "float_parsing": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text; put it in quotes",
    "literal_error": "must be one of {expected}",
    "tuple_type": "must be a list",
    "missing": "must be given; the list is too short",
    "mapping_for_text": "must be text, and no mapping with keys of its own",
    "too_long": "must be a list of {max_length} values",
    "dict_type": "must be a mapping, as in {{key: value}}",
    "dataclass_type": "must be a mapping, as in {{key: value}}",
    "unexpected_keyword_argument": "there is no such key",
}
# Types of a value that may have several, as pydantic's locations name them; others, such as
# constrained-int, are no names of keys.
TYPE_NAMES = ("int", "float", "str", "bool")
# As YAML reads them.
BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# Short names that people write for a word of a setting.
SHORT_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
}


def parse(text: str, *, as_yaml: bool = False) -> Any:
    """Reads an override's value: null, lists, mappings and quoted text as YAML, else plain text."""
    if text in ("null", "~"):
        return None
    if text[:1] == "{":
        # Hydra writes {key:value} without a blank.
        text = re.sub(r"([{,]\s*\w+):(?=[^\s/])", r"\1: ", text)
    if not as_yaml and text[:1] not in ("[", "{", '"', "'"):
        return text
    return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]


def convert(value: Any, leaf: Leaf) -> Any:
    """Returns a YAML value or an override's text as a setting takes it.

    Raises:
        pydantic.ValidationError: the value is not of the setting's type, or outside its bounds.
    """
    kind = leaf.plain
    if isinstance(value, str):
        if leaf.takes_null and value.lower() in ("null", "none", ""):
            return None
        value = _text_as(kind, value)
    # To pydantic truth is a number.
    elif isinstance(value, bool) and kind in (int, float):
        value = str(value)
    # YAML reads a bare `off` as false.
    elif value is False and "off" in leaf.words:
        value = "off"
    if kind is tuple and not isinstance(value, list | tuple):
        value = [] if value in (None, "") else [value]
    adapter = TypeAdapter(leaf.kind, config=ConfigDict(strict=kind is bool, allow_inf_nan=False))
    return adapter.validate_python(value, context=FINDING)


def _text_as(kind: Any, text: str) -> Any:
    """Reads text as a value of the type where pydantic would not: true, 1e3, [a, b]."""
    if kind is bool:
        return BOOLS.get(text.lower(), text)
    if kind is int and re.fullmatch(r"\d+(\.\d+)?[eE]\d+", text):
        return float(text)
    if kind is tuple and text.lstrip().startswith("["):
        return parse(text.strip(), as_yaml=True)
    return text


def fault_location(fault: ErrorDetails) -> str:
    """Names the place within a value at which pydantic found a fault, as in [0].kwargs."""
    places = [step for step in fault["loc"] if not _is_type(step)]
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in places]
    return "".join(steps)


def _is_type(step: int | str) -> bool:
    """Returns whether a step of a location is one of the types that the value may have."""
    return isinstance(step, str) and (step in TYPE_NAMES or not step.isidentifier())


def describe_fault(fault: ErrorDetails, leaf: Leaf) -> str:
    """Describes what a value must be, and the nearest of the words or keys that there are."""
    kind = fault["type"]
    if kind == "string_type" and isinstance(fault["input"], dict):
        kind = "mapping_for_text"
    known = FAULT_SENTENCES.get(kind)
    values = get_args(leaf.kind)
    if kind == "missing" and leaf.plain is tuple and ... not in values:
        sentence = f"must be given: the setting is a list of {len(values)} values"
    elif known is None:
        # A validator's own sentence; pydantic puts two words before it.
        sentence = fault["msg"].removeprefix("Value error, ")
    else:
        sentence = known.format(**fault.get("ctx", {}))
    if leaf.takes_null:
        sentence += " (or null)"
    hint = _nearest_allowed(fault, leaf)
    return f"{sentence}.{hint}" if hint else sentence


def _nearest_allowed(fault: ErrorDetails, leaf: Leaf) -> str:
    """Returns " Did you mean 'x'?" with the nearest word or key, or nothing where none is near."""
    if fault["type"] == "unexpected_keyword_argument":
        # The first type in the brackets of a list, the second in those of a mapping.
        entry_type = get_args(leaf.kind)[1 if leaf.plain is dict else 0]
        return did_you_mean(str(fault["loc"][-1]), entry_type.__dataclass_fields__)
    value = str(fault["input"])
    if value == "megatron":
        return " The Megatron backend is not there"
    allowed = re.findall(r"'(.+?)'", fault.get("ctx", {}).get("expected", ""))
    if leaf.plain is tuple and "," in value:
        return f" A list is written in brackets: [{value}]"
    return did_you_mean(SHORT_NAMES.get(value, value), allowed)


def as_text(value: Any) -> str:
    """Writes a value as one would in a YAML file or an override."""
    if isinstance(value, str):
        is_word = re.fullmatch(r"[A-Za-z_/][\w./+-]*", value) is not None
        if is_word and value.lower() not in ("null", "none"):
            return value
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(as_text, value))}]"
    return json.dumps(value, default=vars)
