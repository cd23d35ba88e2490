"""Reads values from text, converts them to the types of their fields, and writes them as text again.

What is written as YAML loads to an equal config. A word keeps its spelling until the type of its field is known, so
that run 007 is not run 7.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Literal, get_args, get_origin

from omegaconf import OmegaConf
from pydantic import ConfigDict, TypeAdapter
from pydantic_core import ErrorDetails

from data.texts import did_you_mean, table
from training.config.section import FINDING, Leaf, Section, leaves
from training.config.settings import EnvironmentChoice, PPOConfig

SAID: dict[str, str] = table(__file__)


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
    if isinstance(value, str) and (kind in (int, float, bool) or (kind is tuple and value.lstrip()[:1] == "[")):
        value = parse(value.strip(), as_yaml=True)
    # To pydantic truth is a number.
    if isinstance(value, bool) and kind in (int, float):
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
        given, known = str(fault["loc"][-1]), vars(EnvironmentChoice())
    near = " The Megatron backend is not there" if given == "megatron" else did_you_mean(given, known)
    return text + (" (or null)" if leaf.takes_null else "") + (near and f".{near}")


def as_text(value: Any) -> str:
    """Writes a value as one would in a YAML file or an override."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_/][\w./+-]*", value) and value.lower() not in ("null", "none"):
        return value
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(as_text, value))}]"
    return json.dumps(value, default=vars)


def to_yaml(config: PPOConfig) -> str:
    """Writes the whole config as YAML; loading it again gives an equal config."""
    return str(OmegaConf.to_yaml(OmegaConf.create(asdict(config))))


def reference_yaml() -> str:
    """Writes configs/ppo_trainer.yaml: every key with its default, its choices and its documentation."""
    lines = ["# Every key with its default: python -m training.config.loader --reference > configs/ppo_trainer.yaml"]
    return "\n".join([*lines, *_reference_lines(PPOConfig(), "")]) + "\n"


def _reference_lines(section: Section, indent: str) -> Iterator[str]:
    """Writes a section's keys, one a line, its inner sections indented."""
    own = dict(leaves(section))
    for name, value in vars(section).items():
        if isinstance(value, Section):
            yield f"{indent}{name}:  # {(type(value).__doc__ or '').splitlines()[0]}"
            yield from _reference_lines(value, indent + "  ")
        else:
            yield f"{indent}{name}: {as_text(value)}  # {own[name].doc}{_choices(own[name].kind)}"


def _choices(kind: Any) -> str:
    """Lists the words that a field takes, where it takes only some."""
    words = next((get_args(part) for part in (kind, *get_args(kind)) if get_origin(part) is Literal), ())
    return f" ({' | '.join(words)})" if words else ""
