"""Collects what a well-typed configuration can still get wrong, before any model is loaded.

Every problem names the key, its value and the fix; no check keeps another from running. What the
fields of one section contradict stands beside them, in its methods `problems` and `warnings`
(training/config/schema), and what several sections contradict in cross_checks/; packages, files,
users' code, algorithms, engines, rewards, environments and models are looked at in resources/. What
one engine refuses, its own class tells, and a feature checks what it brings.
"""

import logging

from training.config.cross_checks import cross_problems, cross_warnings
from training.config.leaves import sections
from training.config.resources import (
    agents,
    algorithms,
    engines,
    files,
    models,
    packages,
    rewards,
    user_code,
)
from training.config.resources.user_code import load_custom_algorithm as load_custom_algorithm
from training.config.schema.ppo import PPOConfig
from training.features import answers

log = logging.getLogger(__name__)


def check_config(
    config: PPOConfig,
    *,
    ask_hub: bool = True,
    ask_engine: bool = True,
    own_data: bool = False,
    warns: bool = True,
) -> list[str]:
    """Returns all problems of a config; none where it can run here. Logs warnings.

    Args:
        ask_hub: also check models that are no local folders.
        ask_engine: also ask the class of the rollout engine what it needs and refuses, where
            nothing else is wrong: that imports torch and transformers, most of a refusal's time.
            Otherwise it is only checked that there is an engine of that name. `--explain`, which
            answers at once, leaves it out and says so.
        own_data: datasets and environments are passed as objects.
        warns: False: some values are bad and stand at their defaults, of which no warning is meant.
    """
    # A user's file comes first: estimators and engines that it registers are known to the others.
    problems = [*algorithms.check_algorithm(config)]
    warnings: list[str] = []
    for section in sections(config):
        problems += section.problems()
        warnings += section.warnings()
    problems += cross_problems(config)
    warnings += cross_warnings(config)
    problems += answers("checks", config)
    for warning in warnings if warns else []:
        log.warning(warning)
    problems += files.check_tasks(config, own_data)
    problems += engines.check_engine_name(config)
    problems += packages.check_packages(config)
    problems += rewards.check_reward(config, own_data)
    problems += user_code.check_classes(config)
    problems += user_code.check_observers(config)
    problems += user_code.check_optimizers(config)
    problems += files.check_data(config)
    problems += files.check_run_folders(config)
    problems += agents.check_agents(config, own_data)
    problems += models.check_models(config, ask_hub)
    if ask_engine and not problems:
        problems += engines.ask_engine_class(config)
    # Actor and critic may have the same.
    return list(dict.fromkeys(problems))
