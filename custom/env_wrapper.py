"""The adapters' classes under the module name that older guides import.

They live in `features.adapters`, and are imported at first use; nothing is defined here.
"""

from typing import TYPE_CHECKING

from custom.env_factory import make_environment
from data.late_names import late_names

if TYPE_CHECKING:
    from features.adapters.gymnasium import GymnasiumEnvironment
    from features.adapters.reasoning_gym import ReasoningGymEnvironment
    from features.adapters.textarena import TextArenaEnvironment
else:
    __getattr__ = late_names(
        __name__,
        {
            "GymnasiumEnvironment": "features.adapters.gymnasium",
            "ReasoningGymEnvironment": "features.adapters.reasoning_gym",
            "TextArenaEnvironment": "features.adapters.textarena",
        },
    )
