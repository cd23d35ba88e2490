"""Checks the critic against the policy whose rows it is trained on."""

from collections.abc import Iterator

from training.config.cross_checks.updates import update_problems
from training.config.schema.ppo import PPOConfig


def problems(config: PPOConfig) -> Iterator[str]:
    """Yields what keeps values from being learnt beside the policy."""
    yield from _backbone_problems(config)
    yield from _warmup_problems(config)
    if config.need_critic:
        yield from _separate_model_problems(config)


def warnings(config: PPOConfig) -> Iterator[str]:
    """Yields what of the sharding has no effect."""
    if config.need_critic:
        yield from config.critic.fsdp_config.unused("critic", config.trainer.num_ranks)


def _backbone_problems(config: PPOConfig) -> Iterator[str]:
    """Requires, of a model that is shared with the actor, that its values are read."""
    critic = config.critic
    if critic.share_backbone and not config.need_values:
        yield (
            "critic.share_backbone=true: "
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} reads no values; take "
            "it out, or set critic.enable=true"
        )
    path_of_actor = config.actor_rollout_ref.model.path
    if critic.share_backbone and critic.model.path not in (None, path_of_actor):
        yield (
            f"critic.share_backbone=true: critic.model.path={critic.model.path} is not the "
            "actor's; take one of the two out"
        )


def _warmup_problems(config: PPOConfig) -> Iterator[str]:
    """Requires that the steps in which the critic learns alone have one, and leave others."""
    steps = config.trainer.critic_warmup
    if steps > 0 and not config.need_critic:
        yield (
            f"trainer.critic_warmup={steps}: there is no critic to warm up; set "
            "it to 0, or critic.enable=true and no critic.share_backbone"
        )
    last_step = config.trainer.total_training_steps
    if config.need_critic and last_step is not None and last_step <= steps:
        yield (
            f"trainer.critic_warmup={steps} leaves no step to the actor: "
            f"trainer.total_training_steps={last_step}; lower the first or raise the second"
        )


def _separate_model_problems(config: PPOConfig) -> Iterator[str]:
    """Requires that a model of its own can be trained on the batches that the actor's is."""
    actor = config.actor_rollout_ref.actor
    given = config.critic
    critic = config.resolved_critic
    ranks_per_sequence = actor.ulysses_sequence_parallel_size
    if given.ulysses_sequence_parallel_size not in (None, ranks_per_sequence):
        yield (
            "critic.ulysses_sequence_parallel_size="
            f"{given.ulysses_sequence_parallel_size} differs from the actor's "
            f"{ranks_per_sequence}: both read a step's rows in one order; leave it null"
        )
    actor_batch = actor.ppo_mini_batch_size or config.prompts_per_step
    critic_batch = critic.ppo_mini_batch_size or config.prompts_per_step
    if max(actor_batch, critic_batch) % min(actor_batch, critic_batch):
        yield (
            f"actor_rollout_ref.actor.ppo_mini_batch_size={actor.ppo_mini_batch_size} and "
            f"critic.ppo_mini_batch_size={critic.ppo_mini_batch_size} do not nest: a step is "
            "cut once for both, so one must be a multiple of the other"
        )
    yield from given.model.training_problems("critic.model", ranks_per_sequence)
    yield from update_problems("critic", critic, config)
