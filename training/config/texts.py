"""Reads texts.yaml: what checks and a run say, where that takes more than a line of code.

Invariant: every text is said somewhere, with all the facts that it names; tests/unit/test_texts.py looks.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

TEXTS: dict[str, str] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def say(text: str, **facts: Any) -> str:
    """Returns a text, with the facts filled in."""
    return TEXTS[text].format(**facts)


def say_where(found: Mapping[str, object], **facts: Any) -> Iterator[str]:
    """Yields the texts of what was found, with the facts filled in."""
    return (say(text, **facts) for text, there in found.items() if there)
