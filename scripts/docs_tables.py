"""Writes the tables of the docs' reference: every setting, and every field of a batch.

Both are made from what the code itself reads: the schema of the settings and data/fields.yaml.
Invariant: each setting has one row, whose anchor is its key.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt

from training.config import section as section_types
from training.config.leaves import leaves
from training.config.schema.ppo import PPOConfig
from training.config.section import Section
from training.config.values import as_text

PROJECT = Path(__file__).resolve().parents[1]
SETTINGS_INTRODUCTION = """\
# Every setting

Each can be given in a YAML file or on the command line, `python main.py FILE.yaml KEY=VALUE`
([settings.md](../settings.md)). `--explain-all` shows a run's own values, and which file reads
each. A value outside the bounds is refused before a model is loaded.
"""
# Types whose bounds are checked by a function, which a table cannot show.
NAMED_TYPES = {
    section_types.PositiveOrMinusOne: "int ≥ 1, or -1",
    section_types.InputPath: "path",
    section_types.OutputPath: "path",
    section_types.ToolName: "name or path",
    section_types.ParserName: "name, or vllm:NAME",
    section_types.Threshold: "number, or LOWER_UPPER",
    section_types.Command: "text, or list of words",
    section_types.ObjectName: "FILE.py:NAME",
}
SIGNS = {Ge: ("≥", "ge"), Gt: (">", "gt"), Le: ("≤", "le"), Lt: ("<", "lt")}


def settings_page() -> str:
    """Writes the page of every setting: a table for each section, in the schema's order."""
    return "\n".join([SETTINGS_INTRODUCTION, *_section_lines(PPOConfig(), prefix="")]) + "\n"


def _section_lines(section: Section, prefix: str) -> Iterator[str]:
    """Yields the heading, sentence and table of a section, and then those of its inner ones."""
    inner = {name: value for name, value in vars(section).items() if isinstance(value, Section)}
    own = [(key, leaf) for key, leaf in leaves(section, prefix) if _name_in(key, prefix)]
    if prefix:
        yield f"## {(key := prefix.removesuffix('.'))} {{#{key}}}\n"
        yield f"{(type(section).__doc__ or '').splitlines()[0]}\n"
    if own:
        yield "| key | default | values | meaning |"
        yield "|---|---|---|---|"
    for key, leaf in own:
        name = key.removeprefix(prefix)
        cells = [
            f'<a id="{key}"></a>`{name}`',
            _code(as_text(leaf.value)),
            type_words(leaf.kind),
            _text(leaf.doc),
        ]
        yield f"| {' | '.join(cells)} |"
    if own:
        yield ""
    for name, value in inner.items():
        yield from _section_lines(value, f"{prefix}{name}.")


def _name_in(key: str, prefix: str) -> bool:
    """Returns whether a key stands in the section itself, not in one inside it."""
    return "." not in key.removeprefix(prefix)


def type_words(kind: Any) -> str:
    """Describes the values that a setting takes: type, bounds, choices and whether null is one."""
    if kind in NAMED_TYPES:
        return NAMED_TYPES[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return ", or ".join(
            "null" if argument is NoneType else type_words(argument) for argument in arguments
        )
    if origin is Annotated:
        return f"{type_words(arguments[0])}{_bounds(arguments[1:])}"
    if origin is Literal:
        return ", ".join(_code(choice) for choice in arguments)
    if origin is tuple:
        return _list_words(arguments)
    if origin is dict:
        return "mapping"
    if isinstance(kind, type) and issubclass(kind, Section):
        return f"entries of {', '.join(f'`{name}`' for name in kind.__dataclass_fields__)}"
    return {str: "text", bool: "true, false"}.get(kind, kind.__name__)


def _bounds(marks: tuple[Any, ...]) -> str:
    """Writes bounds behind a type, as in " > 0, ≤ 1"."""
    bounds = []
    for mark in marks:
        sign, attribute = SIGNS[type(mark)]
        bounds.append(f"{sign} {getattr(mark, attribute)}")
    return f" {', '.join(bounds)}"


def _list_words(entries: tuple[Any, ...]) -> str:
    """Describes a list: of any length where `...` ends the types of its entries."""
    if entries[-1] is Ellipsis:
        return f"list of {type_words(entries[0])}"
    return f"[{', '.join(type_words(entry) for entry in entries)}]"


def fields_table() -> str:
    """Writes the table of the fields of a batch, a section of the page of DataProto."""
    lines = [
        "\n## Fields of a batch\n",
        "B rows, P and R tokens of prompt and response.\n",
        "| field | shape | dtype | written by | meaning |",
        "|---|---|---|---|---|",
    ]
    fields = yaml.safe_load((PROJECT / "data" / "fields.yaml").read_text())
    for name, (shape, dtype, writer, meaning) in fields.items():
        lines.append(f"| `{name}` | {shape} | {dtype} | {_text(writer)} | {_text(meaning)} |")
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    """Writes text as code; a bar would end the table's cell."""
    return f"`{text}`".replace("|", "\\|") if text else ""


def _text(text: str) -> str:
    """Writes a sentence with nothing in it that Markdown or HTML would read as its own."""
    escaped = html.escape(text, quote=False)
    for mark in ("\\", "*", "_", "|", "[", "]", "`"):
        escaped = escaped.replace(mark, f"\\{mark}")
    return escaped
