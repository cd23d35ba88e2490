"""The adapters' classes under the module name that older guides import.

They live in `custom.adapters`; nothing is defined here.
"""

from contrib.adapters.gymnasium import GymnasiumEnvironment
from contrib.adapters.reasoning_gym import ReasoningGymEnvironment
from contrib.adapters.textarena import TextArenaEnvironment
from custom.env_factory import make_environment
