"""Environments of other libraries by their names in a config, LIBRARY:ID.

Nothing is defined here: custom/env_factory.py makes environments from names, features/adapters
plays those of other libraries.
"""

from typing import Any

from custom.env_factory import (
    Library,
    environment_names,
    libraries,
    library_of,
    make_environment,
)


def __getattr__(name: str) -> Any:
    """Returns what older code takes from here: a table and a text, which features fill."""
    if name == "LIBRARIES":
        return libraries()
    if name == "ENVIRONMENT_NAMES":
        return environment_names()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
