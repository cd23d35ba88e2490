"""From `judges.models` of a config to the service that whoever plays or pays is given by name."""

from pathlib import Path
from typing import Any

from custom.side_services import SideService
from features.judges.model_settings import ModelSettings
from features.judges.registry import service_of
from features.judges.settings import JudgesSettings


def services(config: Any, writes: bool = True) -> list[SideService]:
    """Returns the config's models as the one service that they are.

    Args:
        writes: their answers and locks may be kept in the run's folder.
    """
    folder = models_folder(config) if writes else None
    return [service_of(model_settings(config.section(JudgesSettings), folder))]


def models_folder(config: Any) -> Path:
    """Returns the folder in the run's where what models share is kept."""
    return Path(config.trainer.run_dir).absolute() / "models"


def model_settings(section: JudgesSettings, folder: Path | None) -> dict[str, ModelSettings]:
    """Returns the settings of the models, by name, for any process of the run."""
    settings = {}
    for name, model in section.models.items():
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
            folder=None if folder is None else str(folder / name),
        )
    return settings
