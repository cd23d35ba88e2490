"""Checks ranks and Ray against what runs on them, and training on groups as they finish."""

from collections.abc import Iterator

from training.config.estimator_needs import ESTIMATORS_WITHIN_GROUPS, LOSSES_SUMMED_OVER_TOKENS
from training.config.schema.ppo import PPOConfig


def problems(config: PPOConfig) -> Iterator[str]:
    """Yields what keeps the ranks from starting, or groups from being trained on one by one."""
    yield from _rank_problems(config)
    if config.trainer.train_finished_groups:
        yield from _finished_groups_problems(config)


def warnings(config: PPOConfig) -> Iterator[str]:
    """Yields that Ray is set up and not used."""
    if config.ray_kwargs.says_something and not config.trainer.use_ray:
        yield (
            "ray_kwargs.ray_init has no effect: the one rank runs in this process, without "
            "Ray; set trainer.launcher=ray where it is to run in the cluster"
        )


def _rank_problems(config: PPOConfig) -> Iterator[str]:
    """Requires that several nodes have a cluster, and that the ranks of engines fill nodes."""
    trainer = config.trainer
    ranks_per_engine = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if trainer.use_ray and trainer.nnodes > 1 and not config.ray_kwargs.joins_a_cluster:
        yield (
            f"trainer.nnodes={trainer.nnodes} needs ray_kwargs.ray_init.address: run `ray start "
            "--head` on the first machine, `ray start --address=HOST:6379` on the others, and "
            "set ray_kwargs.ray_init.address=auto; for ranks on this machine alone set "
            "trainer.n_gpus_per_node"
        )
    if trainer.rollout_n_gpus:
        ranks_on_a_node = min(trainer.rollout_n_gpus, trainer.n_gpus_per_node)
        fills_engines = trainer.rollout_n_gpus % ranks_per_engine == 0
        fills_nodes = trainer.rollout_n_gpus % ranks_on_a_node == 0
        if not (fills_engines and fills_nodes):
            yield (
                f"trainer.rollout_n_gpus={trainer.rollout_n_gpus} must be a multiple of "
                "actor_rollout_ref.rollout.tensor_model_parallel_size="
                f"{ranks_per_engine}, and at most "
                f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} or a multiple of it: whole "
                "nodes"
            )


def _finished_groups_problems(config: PPOConfig) -> Iterator[str]:
    """Requires, to train on groups one by one, that no number but the last is of the batch."""
    algorithm = config.algorithm
    actor = config.actor_rollout_ref.actor
    correction = config.with_correction.algorithm.rollout_correction
    correction_key = "algorithm.rollout_correction"
    must_be_off = {
        f"{correction_key}.rollout_is": correction.rollout_is,
        f"{correction_key}.rollout_rs": correction.rollout_rs,
        f"{correction_key}.rollout_token_veto_threshold": (correction.rollout_token_veto_threshold),
        f"{correction_key}.bypass_mode": correction.bypass_mode,
        "algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
        "algorithm.use_pf_ppo": algorithm.use_pf_ppo,
        "algorithm.filter_groups.enable": algorithm.filter_groups.enable,
        "agent.observation_loss_coef": config.agent.observation_loss_coef,
        "critic.enable": config.critic.enable,
        "trainer.async_level": config.trainer.async_level,
        "actor_rollout_ref.actor.fsdp_config.param_offload": actor.fsdp_config.param_offload,
    }
    contradictions = {key: value for key, value in must_be_off.items() if value}
    if algorithm.adv_estimator not in ESTIMATORS_WITHIN_GROUPS:
        contradictions["algorithm.adv_estimator"] = algorithm.adv_estimator
    if config.loss_mode not in LOSSES_SUMMED_OVER_TOKENS:
        loss_key = "actor_rollout_ref.actor.policy_loss.loss_mode"
        contradictions[loss_key] = actor.policy_loss.loss_mode
    if actor.ppo_epochs > 1:
        contradictions["actor_rollout_ref.actor.ppo_epochs"] = actor.ppo_epochs
    if actor.ppo_mini_batch_size not in (None, config.prompts_per_step):
        batch_key = "actor_rollout_ref.actor.ppo_mini_batch_size"
        contradictions[batch_key] = actor.ppo_mini_batch_size

    if contradictions:
        settings = ", ".join(f"{key}={value}" for key, value in contradictions.items())
        yield (
            "trainer.train_finished_groups=true makes a step's one update group by group, "
            f"which {settings} cannot do. It needs actor_rollout_ref.actor.ppo_epochs=1 and "
            "ppo_mini_batch_size=null, algorithm.adv_estimator one of "
            f"{', '.join(ESTIMATORS_WITHIN_GROUPS)}, policy_loss.loss_mode one of "
            f"{', '.join(LOSSES_SUMMED_OVER_TOKENS)}, trainer.async_level=0, and does without "
            "a critic, algorithm.use_kl_in_reward, use_pf_ppo, filter_groups, "
            "rollout_correction (rollout_is=off), agent.observation_loss_coef and "
            "param_offload"
        )
