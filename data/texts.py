"""SHIM: texts of texts.yaml for modules that do not hold their sentences yet; names that moved.

`did_you_mean`, `same_words`, `unknown_name`, `registering` and `registered` stand in data/names.py,
`warn_once` in data/warn_once.py.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from data.names import did_you_mean as did_you_mean
from data.names import registered as registered
from data.names import registering as registering
from data.names import same_words as same_words
from data.names import unknown_name as unknown_name
from data.warn_once import warn_once as warn_once


def table(module: str, name: str = "") -> Any:
    """Returns the YAML table that lies beside a module's file, of its name or another."""
    path = Path(module)
    return yaml.safe_load(path.with_name(f"{name or path.stem}.yaml").read_text(encoding="utf-8"))


@cache
def texts() -> dict[str, str]:
    """Returns every text by its name, read when the first is said."""
    return table(__file__)


def say(text: str, /, **facts: Any) -> str:
    """Returns a text, with the facts filled in."""
    return texts()[text].format(**facts)


def say_where(found: Mapping[str, object], /, **facts: Any) -> Iterator[str]:
    """Yields the texts of what was found, with the facts filled in."""
    return (say(text, **facts) for text, there in found.items() if there)
