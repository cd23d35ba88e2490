"""SHIM: moved to contrib/adapters."""

from contrib.adapters.gymnasium import GymnasiumEnvironment as GymnasiumEnvironment
from contrib.adapters.gymnasium import worst_reward as worst_reward
from contrib.adapters.gymnasium_spaces import space_to_text as space_to_text
