"""Models beside the policy, which environments, tools, rewards and programs ask: judges.models."""

from features.judges.settings import JudgesSettings
from training.features import Feature

FEATURE = Feature(
    section=JudgesSettings,
    moved_keys={"agent.models": "judges.models"},
    moved_modules={
        "custom.models.usage": "custom.model_usage",
        "custom.models.errors": "custom.model_errors",
        "custom.models.settings": "features.judges.model_settings",
        "custom.models": "features.judges",
        "features.judges.errors": "custom.model_errors",
        "training.config.schema.side_models": "features.judges.settings",
        "training.model_trial": "features.judges.trial",
    },
    checks="features.judges.settings:config_problems",
    services="features.judges.service:services",
)
