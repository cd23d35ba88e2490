"""Models beside the policy: judges, simulated users and opponents behind servers.

    from features.judges import models

    judge = models["judge"]                      # judges.models.judge of the config
    judge.ask("Is 91 prime? Answer yes or no.")  # "no"

They may be asked from environments, tools and reward functions, in whichever process those live.

    settings        of the config: judges.models
    model_settings  a model's settings, as processes hand them on
    service         the models as a service, which the core hands on without knowing what it is
    registry        which models this process has
    model           `Model.ask`, and its forms for several questions and for `await`
    requests        one request: deadline, retries, what an answer must be
    slots           the limit on requests at once, over all processes of a machine
    cache           answers by content, in memory and in the run's folder

Invariant: a question ends with a text or a ModelError, within its deadline; keys are read from the
process's environment where they are sent, and are never kept. Names are loaded when first used, so
that reading a config loads no client.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from custom.model_errors import ModelError, ModelTimeout
    from features.judges.model import Model
    from features.judges.model_settings import ModelSettings
    from features.judges.registry import install_models, installed_models, models

__all__ = [
    "Model",
    "ModelError",
    "ModelSettings",
    "ModelTimeout",
    "install_models",
    "installed_models",
    "models",
]
PLACES = {
    "Model": "features.judges.model",
    "ModelError": "custom.model_errors",
    "ModelSettings": "features.judges.model_settings",
    "ModelTimeout": "custom.model_errors",
    "install_models": "features.judges.registry",
    "installed_models": "features.judges.registry",
    "models": "features.judges.registry",
}


def __getattr__(name: str) -> Any:
    """Loads a name of this package when it is first used."""
    if name not in PLACES:
        raise AttributeError(f"module {__name__} has no {name}")
    return getattr(importlib.import_module(PLACES[name]), name)
