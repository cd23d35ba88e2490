"""Asks the models beside the policy before a run, so that a mistake costs no step.

Invariant: what is wrong with any of them is told together, in the list of problems of the config.
"""

import logging
import os
from concurrent.futures import ThreadPoolExecutor

from custom.model_errors import ModelError
from custom.model_usage import USAGE
from data.watchdog import ATTEMPT
from features.judges.model import Model
from features.judges.model_settings import ModelSettings
from features.judges.service import model_settings, models_folder
from features.judges.settings import JudgesSettings
from training.config import PPOConfig
from training.config.loader import ConfigError

logger = logging.getLogger(__name__)


def try_models(config: PPOConfig) -> None:
    """Sends each model of `judges.models` a small request, unless its `trial` is false.

    Of a run that is started again by itself it is a warning: a server that is away for a while must
    not end it.

    Raises:
        ConfigError: models do not answer.
    """
    section = config.section(JudgesSettings)
    wanted = [
        settings
        for name, settings in model_settings(section, models_folder(config)).items()
        if section.models[name].trial
    ]
    if not wanted:
        return
    with ThreadPoolExecutor(len(wanted)) as executor:
        problems = [problem for problem in executor.map(_problem_of, wanted) if problem]
    # The trial is no part of a step.
    USAGE.take()
    if problems and os.environ.get(ATTEMPT, "1") == "1":
        raise ConfigError(problems)
    for problem in problems:
        logger.warning("%s", problem)


def _problem_of(settings: ModelSettings) -> str:
    """Returns why a model does not answer; empty where it does."""
    try:
        Model(settings).check()
    except ModelError as error:
        return (
            f"judges.models.{settings.name}: {error}; "
            f"judges.models.{settings.name}.trial=false starts without asking it"
        )
    return ""
