"""Collects what the settings of two or more sections contradict, by subject.

    algorithm   estimator, KL, correction, groups
    policy      the policy's loss, its models, and the passes over its rows
    updates     how a step is cut into mini-batches and over ranks; resuming
    critic      the values beside the policy
    rollout     engine, lengths and validation
    rewards     who scores
    agents      environments and what is recorded of them
    ranks       ranks, Ray, and training on groups as they finish
    order       the sampler of the training rows

What the fields of one section contradict is said by its own methods `problems` and `warnings`.
Invariant: a check raises nothing, so that all problems are reported together; it looks at settings
alone, at no file, model or machine (those are in training/config/resources).
"""

from collections.abc import Iterator

from training.config.cross_checks import (
    agents,
    algorithm,
    critic,
    order,
    policy,
    ranks,
    rewards,
    rollout,
    updates,
)
from training.config.schema.ppo import PPOConfig

SUBJECTS_OF_PROBLEMS = (rewards, policy, updates, rollout, critic, algorithm, ranks, agents, order)
SUBJECTS_OF_WARNINGS = (policy, rollout, critic, algorithm, ranks, agents)


def cross_problems(config: PPOConfig) -> Iterator[str]:
    """Yields a sentence for each combination that cannot run; it names key, value and fix."""
    for subject in SUBJECTS_OF_PROBLEMS:
        yield from subject.problems(config)


def cross_warnings(config: PPOConfig) -> Iterator[str]:
    """Yields a sentence for each setting that runs, but hardly as it was meant."""
    for subject in SUBJECTS_OF_WARNINGS:
        yield from subject.warnings(config)
