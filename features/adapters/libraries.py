"""Lists the libraries whose environments a config names as LIBRARY:ID, and who plays each.

Invariant: neither a library nor an adapter is imported here.
"""

from custom.env_factory import Library

LIBRARIES = {
    "gymnasium": Library(
        package="gymnasium",
        adapter="features.adapters.gymnasium:GymnasiumEnvironment",
        own_process=False,
    ),
    "reasoning_gym": Library(
        package="reasoning-gym",
        adapter="features.adapters.reasoning_gym:ReasoningGymEnvironment",
    ),
    "textarena": Library(
        package="textarena",
        adapter="features.adapters.textarena:TextArenaEnvironment",
    ),
    "textworld": Library(
        package="textworld",
        adapter="features.adapters.textworld:TextWorldEnvironment",
    ),
    # Its server has the library; only a WebSocket is needed here.
    "openenv": Library(
        package="'websockets>=15'",
        adapter="features.adapters.openenv:OpenEnvEnvironment",
        own_process=False,
        module="websockets",
    ),
    "verifiers": Library(
        package=(
            "'verifiers>=0.4,<0.5'; it excludes vLLM's packages: with them set "
            "programs.verifiers.python"
        ),
        adapter="features.adapters.verifiers:VerifiersEnvironment",
        network=True,
        # What older versions lack.
        module="verifiers.v1",
    ),
}
