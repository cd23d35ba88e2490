"""Models beside the policy: judges, simulated users and opponents behind servers.

    from features.judges import models

    judge = models["judge"]                      # agent.models.judge of the config
    judge.ask("Is 91 prime? Answer yes or no.")  # "no"

They may be asked from environments, tools and reward functions, in whichever process those live.

    settings        a model's settings, and which of them this process has
    model           `Model.ask`, and its forms for several questions and for `await`
    requests        one request: deadline, retries, what an answer must be
    slots           the limit on requests at once, over all processes of a machine
    cache           answers by content, in memory and in the run's folder
    usage           what was asked, until a step's metrics read it
    errors          `ModelError`, which callers may catch

Invariant: a question ends with a text or a ModelError, within its deadline; keys are read from the
process's environment where they are sent, and are never kept.
"""

from features.judges.errors import ModelError, ModelTimeout
from features.judges.model import Model
from features.judges.registry import install_models, installed_models, models
from features.judges.settings import ModelSettings

__all__ = [
    "Model",
    "ModelError",
    "ModelSettings",
    "ModelTimeout",
    "install_models",
    "installed_models",
    "models",
]
