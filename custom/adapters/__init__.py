"""Environments of other libraries by their names in a config, LIBRARY:ID.

Nothing is defined here: custom/env_factory.py makes environments from names, features/adapters
plays those of other libraries.
"""

from custom.env_factory import (
    ENVIRONMENT_NAMES,
    LIBRARIES,
    Library,
    library_of,
    make_environment,
)
