"""The adapters under the name that older guides import; they live in `custom.adapters`, and nothing is defined here."""

from custom.adapters.base import make_environment
from custom.adapters.gymnasium import GymnasiumEnvironment
from custom.adapters.reasoning_gym import ReasoningGymEnvironment
from custom.adapters.textarena import TextArenaEnvironment
