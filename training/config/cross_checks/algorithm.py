"""Checks estimator, KL and correction against the policy, the critic and the engine."""

from collections.abc import Iterator

from training.config.schema.ppo import PPOConfig
from training.core_algos.built_in import BUILT_IN_ESTIMATORS
from training.features import folder_that_brings, named


def problems(config: PPOConfig) -> Iterator[str]:
    """Yields what the estimator, the correction or the filter of groups lacks."""
    yield from _filter_problems(config)
    yield from _correction_problems(config)
    yield from _estimator_problems(config)
    yield from _branch_problems(config)
    yield from _group_problems(config)


def warnings(config: PPOConfig) -> Iterator[str]:
    """Yields that an estimator which compares the members of a group has nothing to compare."""
    estimator = config.algorithm.adv_estimator
    # What one of a user's own does with groups is not known.
    is_built_in = estimator in BUILT_IN_ESTIMATORS
    compares_members = is_built_in and "index" in config.estimator_needs
    # They compare turns with continuations first.
    compares_members = compares_members and "branch_returns" not in config.estimator_needs
    if compares_members and config.actor_rollout_ref.rollout.n == 1:
        yield (
            f"algorithm.adv_estimator={estimator} compares the responses of a group, "
            "but actor_rollout_ref.rollout.n=1: each keeps its raw score"
        )


def _filter_problems(config: PPOConfig) -> Iterator[str]:
    """Yields what leaves no group that could differ within itself."""
    n = config.actor_rollout_ref.rollout.n
    if config.algorithm.filter_groups.enable and n == 1:
        yield (
            "algorithm.filter_groups.enable=true: a group of actor_rollout_ref.rollout.n=1 "
            "never differs within itself; raise n"
        )


def _correction_problems(config: PPOConfig) -> Iterator[str]:
    """Yields which log-probs the correction in force would miss, or leave others without."""
    in_force = config.with_correction.algorithm.rollout_correction
    reads_engine = in_force.corrects or in_force.bypass_mode
    if reads_engine and not config.actor_rollout_ref.rollout.calculate_log_probs:
        yield (
            "algorithm.rollout_correction reads the engine's log-probs: set "
            "actor_rollout_ref.rollout.calculate_log_probs=true"
        )
    reads_the_pass = config.algorithm.use_kl_in_reward or "sum_pi_squared" in config.estimator_needs
    if in_force.bypass_mode and reads_the_pass:
        yield (
            "algorithm.rollout_correction.bypass_mode makes no pass that use_kl_in_reward or "
            "the estimator reads"
        )


def _estimator_problems(config: PPOConfig) -> Iterator[str]:
    """Yields that the estimator reads a model which is not there."""
    algorithm = config.algorithm
    if "values" in config.estimator_needs and not config.need_values:
        yield (
            f"algorithm.adv_estimator={algorithm.adv_estimator} reads a critic's values: set "
            "critic.enable=true, or null"
        )
    has_teacher = config.actor_rollout_ref.ref.model.path or algorithm.distillation_task
    if algorithm.adv_estimator == "on_policy_distillation" and not has_teacher:
        yield (
            "algorithm.adv_estimator=on_policy_distillation needs a teacher, "
            "actor_rollout_ref.ref.model.path, or with distillation_task the policy as it "
            "began"
        )


def _branch_problems(config: PPOConfig) -> Iterator[str]:
    """Yields what an estimator that compares turns with continuations cannot go with.

    Whether continuations are sampled is checked where that is set.
    """
    if "branch_returns" not in config.estimator_needs:
        return
    if not any(named("branches")):
        yield (
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} reads branch_returns, what "
            "continuations of each turn earned, which "
            f"{folder_that_brings('branches')} samples, which is not here: put the folder back, or "
            "take an estimator that reads none, such as rloo or turn_return"
        )
    if config.algorithm.use_kl_in_reward:
        yield (
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares rewards with what "
            "continuations earned, which has no KL in it: set algorithm.use_kl_in_reward=false, "
            "and actor_rollout_ref.actor.use_kl_loss=true instead"
        )


def _group_problems(config: PPOConfig) -> Iterator[str]:
    """Yields what an estimator that compares the members of a group lacks in one of size n."""
    algorithm = config.algorithm
    n = config.actor_rollout_ref.rollout.n
    estimators = {"algorithm.adv_estimator": algorithm.adv_estimator}
    if algorithm.adv_estimator == "on_policy_distillation" and algorithm.distillation_task:
        estimators["algorithm.distillation_task"] = algorithm.distillation_task
    for key, name in estimators.items():
        if name == "grpo_passk" and n == 1:
            yield (
                f"{key}=grpo_passk compares the two best of a group, and a group of "
                "actor_rollout_ref.rollout.n=1 has no second: set n above 1"
            )
        if name == "maxrl" and algorithm.use_kl_in_reward:
            yield (
                f"{key}=maxrl divides by a group's mean reward, and with "
                "algorithm.use_kl_in_reward=true that of wrong answers is their KL alone: set "
                "it to false, and actor_rollout_ref.actor.use_kl_loss=true instead"
            )
