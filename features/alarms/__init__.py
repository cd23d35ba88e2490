"""Says in one line when something silently goes wrong in a run.

`monitor` runs the rules after every step. `rules/` has them, in files by what they look at; each
says in its decorator which alarms it rings, with what to check. `rule` registers them, and
`catalogue` finds them.
"""

import importlib
from typing import Any

# Names of this package -> the module that has them, and what they are called there.
NAMES = {
    "ADVICE": ("features.alarms.catalogue", "ADVICE"),
    "Alarms": ("features.alarms.monitor", "Alarms"),
    "AlarmStop": ("training.observers", "RunStopped"),
}


def __getattr__(name: str) -> Any:
    """Imports a name at its first use: a config asks for the settings alone."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, own_name = NAMES[name]
    return getattr(importlib.import_module(module), own_name)
