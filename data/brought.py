"""Hands on what features bring to those who stand below training/features.py: `data`, `custom`.

Invariant: features are asked by name, and not before someone asks here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

# Who reads the folders; it stands above this module.
READER = "training.features"


def brought(attribute: str) -> Iterator[Any]:
    """Yields the objects that features name under an attribute of theirs."""
    yield from importlib.import_module(READER).brought(attribute)


def folder_without(attribute: str, name: str) -> str | None:
    """Returns the folder that is gone and with it the name under this attribute; else None."""
    folder: str | None = importlib.import_module(READER).folder_without(attribute, name)
    return folder
