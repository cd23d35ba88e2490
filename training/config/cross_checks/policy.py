"""Checks the policy's loss, its models and its passes against the rest of the run."""

from collections.abc import Iterator

from training.config.schema.ppo import PPOConfig

KEY = "actor_rollout_ref"


def problems(config: PPOConfig) -> Iterator[str]:
    """Yields what keeps the policy from being trained as its settings say."""
    yield from config.actor_rollout_ref.model.training_problems(
        f"{KEY}.model", config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    )
    yield from _loss_problems(config)
    yield from _reference_problems(config)
    yield from _pass_problems(config)


def warnings(config: PPOConfig) -> Iterator[str]:
    """Yields what of the sharding has no effect."""
    policy = config.actor_rollout_ref
    ranks = config.trainer.num_ranks
    yield from policy.actor.fsdp_config.unused(f"{KEY}.actor", ranks)
    yield from policy.ref.fsdp_config.unused(f"{KEY}.ref", ranks)
    if policy.rollout.enable_rollout_routing_replay and not config.replays_routing:
        yield (
            f"{KEY}.rollout.enable_rollout_routing_replay=true has no effect with "
            f"{KEY}.actor.router_replay.mode=disabled, as nothing reads the choices; set R3"
        )


def _loss_problems(config: PPOConfig) -> Iterator[str]:
    """Yields what the chosen loss lacks, and that another one is in force."""
    key = f"{KEY}.actor.policy_loss"
    choice = config.actor_rollout_ref.actor.policy_loss
    bypasses = config.algorithm.rollout_correction.bypass_mode
    if config.loss_mode == "dro" and choice.dro_beta is None:
        yield f"{key}.dro_beta=null: loss_mode=dro needs it, above 0"
    if choice.loss_mode == "bypass_mode" and not bypasses:
        yield (
            f"{key}.loss_mode=bypass_mode: set algorithm.rollout_correction.bypass_mode=true "
            "instead"
        )
    if bypasses and choice.loss_mode not in ("vanilla", "bypass_mode"):
        yield (
            "algorithm.rollout_correction.bypass_mode has losses of its own (loss_type): "
            f"loss_mode={choice.loss_mode} is not read; leave it at vanilla"
        )


def _reference_problems(config: PPOConfig) -> Iterator[str]:
    """Yields that nothing reads the log-probs of the teacher."""
    path = config.actor_rollout_ref.ref.model.path
    if path is not None and not config.need_reference:
        yield (
            f"{KEY}.ref.model.path={path} is not read: set "
            "actor_rollout_ref.actor.use_kl_loss=true, algorithm.use_kl_in_reward=true or "
            "algorithm.adv_estimator=on_policy_distillation, or take it out"
        )


def _pass_problems(config: PPOConfig) -> Iterator[str]:
    """Yields what keeps the log-prob passes of actor and reference from being cut."""
    policy = config.actor_rollout_ref
    row_length = config.data.row_length
    yield from policy.log_prob_micro_batching.problems_of_pass(
        f"{KEY}.rollout.log_prob", row_length
    )
    if config.need_reference:
        yield from policy.ref_micro_batching.problems_of_pass(f"{KEY}.ref.log_prob", row_length)
