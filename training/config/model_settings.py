"""From `agent.models` of a config to what environments, tools and rewards are given of it."""

from pathlib import Path

from features.judges import ModelSettings
from training.config.schema.ppo import PPOConfig


def model_settings(config: PPOConfig) -> dict[str, ModelSettings]:
    """Returns the settings of the models beside the policy, by name, for any process of the run."""
    folder = Path(config.trainer.run_dir).absolute() / "models"
    settings = {}
    for name, model in config.agent.models.items():
        settings[name] = ModelSettings(
            name=name,
            base_url=model.base_url,
            model=model.model,
            key_env=model.key_env,
            timeout_s=model.timeout_s,
            max_retries=model.max_retries,
            max_concurrency=model.max_concurrency,
            cache=model.cache,
            price_in=model.price_in,
            price_out=model.price_out,
            body=model.body,
            folder=str(folder / name),
        )
    return settings
