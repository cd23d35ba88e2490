"""The adapters' classes under the module name that older guides import.

They live in `custom.adapters`; nothing is defined here.
"""

from custom.env_factory import make_environment
from features.adapters.gymnasium import GymnasiumEnvironment
from features.adapters.reasoning_gym import ReasoningGymEnvironment
from features.adapters.textarena import TextArenaEnvironment
