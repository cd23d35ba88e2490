"""Reads texts.yaml: what any room says in more than a line of code; `say` fills a text in.

Invariant: every text is said somewhere, with all the facts that it names; tests/unit/test_texts.py looks. Nothing here
imports torch, as an environment's process says such texts too.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def texts() -> dict[str, str]:
    """Returns every text by its name, read when the first is said."""
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def say(text: str, /, **facts: Any) -> str:
    """Returns a text, with the facts filled in."""
    return texts()[text].format(**facts)


def say_where(found: Mapping[str, object], /, **facts: Any) -> Iterator[str]:
    """Yields the texts of what was found, with the facts filled in."""
    return (say(text, **facts) for text, there in found.items() if there)
