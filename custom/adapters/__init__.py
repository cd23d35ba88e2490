"""Environments of other libraries, and the way from a name in a config to an environment.

Invariant: a library is imported only when one of its environments is made.
"""

from custom.adapters.base import ENVIRONMENT_NAMES, LIBRARIES, fill_template, library_of
from custom.adapters.gymnasium import GymnasiumEnvironment, plain_picture, space_to_text
from custom.adapters.make import make_environment
from custom.adapters.reasoning_gym import ReasoningGymEnvironment
from custom.adapters.textarena import TextArenaEnvironment
from custom.adapters.textworld import TextWorldEnvironment
from custom.adapters.verifiers import VerifiersEnvironment
