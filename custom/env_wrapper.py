"""The adapters under the name that older guides use; they live in `custom.adapters`."""

from custom.adapters.gymnasium import GymnasiumEnvironment
from custom.adapters.make import make_environment
from custom.adapters.reasoning_gym import ReasoningGymEnvironment
from custom.adapters.textarena import TextArenaEnvironment
