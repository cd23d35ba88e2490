"""Environments of other libraries, and the way from a name in a config to an environment.

Invariant: a library, and the adapter to it, is imported only when one of its environments is made.
"""

from custom.adapters.base import ENVIRONMENT_NAMES, LIBRARIES, library_of
