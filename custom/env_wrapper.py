"""The adapters' classes under the module name that older guides import.

They live in `custom.adapters`; nothing is defined here.
"""

from custom.adapters.base import make_environment
from custom.adapters.gymnasium import GymnasiumEnvironment
from custom.adapters.reasoning_gym import ReasoningGymEnvironment
from custom.adapters.textarena import TextArenaEnvironment
