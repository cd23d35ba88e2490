"""Asks the models beside the policy before a run, so that a mistake costs no step.

Invariant: what is wrong with any of them is told together, in the list of problems of the config.
"""

import logging
import os
from concurrent.futures import ThreadPoolExecutor

from custom.model_usage import USAGE
from data.watchdog import ATTEMPT
from features.judges import Model, ModelError, ModelSettings
from features.judges.errors import UnknownModel
from training.config import PPOConfig
from training.config.loader import ConfigError
from training.config.model_settings import model_settings

logger = logging.getLogger(__name__)


def try_models(config: PPOConfig) -> None:
    """Sends each model of `agent.models` a small request, unless its `trial` is false.

    Of a run that is started again by itself it is a warning: a server that is away for a while must
    not end it.

    Raises:
        ConfigError: models do not answer.
    """
    wanted = [
        settings
        for name, settings in model_settings(config).items()
        if config.agent.models[name].trial
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
            f"agent.models.{settings.name}: {error}; "
            f"agent.models.{settings.name}.trial=false starts without asking it"
        )
    return ""


def with_cause_first(message: str, description: str) -> str:
    """Returns a message with a crash's description; that the config lacks a model comes first.

    Args:
        message: which trial the crash was in.
        description: by `custom.env_calls.describe`.
    """
    first, _, frames = description.partition("\n")
    kind, _, cause = first.partition(": ")
    if not kind.endswith(UnknownModel.__name__):
        return f"{message}: {description}"
    return f"{cause} {message}:\n{frames}"
