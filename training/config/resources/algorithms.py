"""Checks that estimator, policy loss and rollout correction are there, users' own among them."""

from collections.abc import Iterator

from training.config.resources.user_code import unusable_file, value_errors
from training.config.schema.algorithm import RolloutCorrectionConfig
from training.config.schema.ppo import PPOConfig
from training.core_algos.built_in import (
    ESTIMATOR_NEEDS,
    LOSSES_SUMMED_OVER_TOKENS,
    estimator_needs,
)


def check_algorithm(config: PPOConfig) -> Iterator[str]:
    """Requires that loss, estimator and rollout correction exist, the user's own among them."""
    correction = config.with_correction.algorithm.rollout_correction
    yield from _check_correction(correction)
    if config.custom_algorithm:
        problems = unusable_file("custom_algorithm", config.custom_algorithm)
        yield from problems
        # Nobody knows what the file would have registered.
        if problems:
            return
    yield from _check_loss(config, correction)
    yield from _check_estimator(config.algorithm.adv_estimator)
    task = config.algorithm.distillation_task
    if task is not None:
        yield from _check_estimator(task)
        if set(estimator_needs(task)) - {"index"}:
            yield (
                f"algorithm.distillation_task={task} must be an estimator that compares a "
                "group's scores, as grpo"
            )


def _check_correction(correction: RolloutCorrectionConfig) -> Iterator[str]:
    """Requires thresholds that can be read, by correcting a batch of one token."""
    if correction == RolloutCorrectionConfig():
        return
    # Imports torch: late.
    import torch

    from training.core_algos import correct_as

    log_probs = torch.zeros(1, 1)
    mask = torch.ones(1, 1)
    for problem in value_errors(correct_as, correction, log_probs, log_probs, mask):
        yield f"algorithm.rollout_correction.{problem}"


def _check_loss(config: PPOConfig, correction: RolloutCorrectionConfig) -> Iterator[str]:
    """Requires that the loss exists, and takes importance weights where there are some."""
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    # These exist and take weights, which is known without importing torch.
    if mode in LOSSES_SUMMED_OVER_TOKENS:
        return
    from training.core_algos import accepted_arguments, get_policy_loss_fn

    refusals = value_errors(get_policy_loss_fn, mode)
    yield from refusals
    if refusals or not correction.rollout_is:
        return
    if not accepted_arguments(get_policy_loss_fn(mode), {"rollout_is_weights": None}):
        yield (
            f"actor_rollout_ref.actor.policy_loss.loss_mode={mode} takes no rollout_is_weights, "
            f"which algorithm.rollout_correction.rollout_is={correction.rollout_is} makes (the "
            "default where trainer.async_level is above 0): give the function that argument, by "
            "which each token's loss is to be multiplied, or set rollout_is=off"
        )


def _check_estimator(name: str) -> Iterator[str]:
    """Requires that an estimator exists; those in the table do, which needs no torch."""
    if name in ESTIMATOR_NEEDS:
        return
    if name.lower() == "ppo":
        yield f"algorithm.adv_estimator={name} is no estimator: PPO with a critic is 'gae'"
        return
    from training.core_algos import get_adv_estimator_fn

    yield from value_errors(get_adv_estimator_fn, name)
