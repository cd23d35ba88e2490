"""Collects what a well-typed configuration can still get wrong, before any model is loaded.

Every problem names the key, its value and the fix; no check keeps another from running. What fields
contradict stands beside them, in the method `problems` of their section (training/config/schema);
what an engine needs is in engine_checks.py; packages, files, users' code, algorithms, rewards,
environments and models are looked at in resources/.
"""

from training.config.engine_checks import check_engine
from training.config.leaves import sections
from training.config.resources import (
    agents,
    algorithms,
    files,
    models,
    packages,
    rewards,
    user_code,
)
from training.config.resources.user_code import load_custom_algorithm as load_custom_algorithm
from training.config.schema.ppo import PPOConfig


def check_config(config: PPOConfig, *, ask_hub: bool = True, own_data: bool = False) -> list[str]:
    """Returns all problems of a config; none where it can run here.

    Args:
        ask_hub: also check models that are no local folders.
        own_data: datasets and environments are passed as objects.
    """
    # A user's file comes first: the estimators that it registers are known to the other checks.
    problems = [*algorithms.check_algorithm(config)]
    for section in sections(config):
        problems += section.problems(config)
    problems += files.check_tasks(config, own_data)
    problems += check_engine(config)
    problems += packages.check_packages(config)
    problems += rewards.check_reward(config)
    problems += user_code.check_classes(config)
    problems += files.check_data(config)
    problems += files.check_run_folders(config)
    problems += agents.check_agents(config)
    problems += models.check_models(config, ask_hub)
    # Actor and critic may have the same.
    return list(dict.fromkeys(problems))
