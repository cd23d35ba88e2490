"""Takes recorded episodes through rewards and advantages to the policy loss and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from data.protocol import DataProto
from training.advantage import apply_kl_penalty, compute_advantage
from training.agent_trainer import environment_rewards
from training.config import PPOConfig
from training.config.checks import load_custom_algorithm
from training.core_algos import estimator_needs, get_kl_controller
from training.reward import compute_reward
from workers.fsdp_workers import ActorRolloutRefWorker

PRINTED_METRICS = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm")
Report = Callable[[str], None]


def loss_of(config: PPOConfig, batch: DataProto, report: Report = print) -> dict[str, float]:
    """Computes rewards, advantages, the policy loss and its gradient's norm.

    All rows are one mini-batch. The weights in memory take the step, and are forgotten.

    Args:
        config: for one rank.
        batch: the rows of the episodes, as they are trained on.
        report: takes each line that is to be printed on the way.
    Returns:
        The metrics of PRINTED_METRICS that the update gives.
    """
    if config.custom_algorithm:
        load_custom_algorithm(config.custom_algorithm)
    worker = ActorRolloutRefWorker(config, "actor")
    worker.init_model(1, config.batch_plan)
    batch.meta_info["temperature"] = config.actor_rollout_ref.rollout.temperature
    batch.batch["old_log_probs"] = worker.compute_log_prob(batch).batch["old_log_probs"]
    report_log_probs(batch, report)
    batch = _with_advantages(config, batch, report)
    metrics = worker.actor.update_policy(batch, replace(config.batch_plan.actor, mini_batches=1))
    return {name: value for name, value in metrics.items() if name in PRINTED_METRICS}


def _with_advantages(config: PPOConfig, batch: DataProto, report: Report) -> DataProto:
    """Adds rewards, the reference's log-probs where they are read, and advantages."""
    rewards, _ = compute_reward(batch, environment_rewards)  # (rows, response_len)
    batch.batch["token_level_scores"] = rewards
    batch.batch["token_level_rewards"] = rewards
    # The reference starts from the config's model, too.
    if config.need_reference:
        batch.batch["ref_log_prob"] = batch.batch["old_log_probs"].clone()
    algorithm = config.algorithm
    if algorithm.use_kl_in_reward:
        kl_controller = get_kl_controller(algorithm.kl_ctrl)
        batch, _ = apply_kl_penalty(batch, kl_controller, algorithm.kl_penalty)
    if "values" in estimator_needs(algorithm.adv_estimator):
        report(
            f"{algorithm.adv_estimator} reads a critic's values, of which there is no record: "
            "taken as zeros"
        )
        batch.batch["values"] = torch.zeros_like(batch.batch["old_log_probs"])
    return compute_advantage(
        batch,
        algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        num_repeat=config.actor_rollout_ref.rollout.n,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        config=algorithm,
    )


def report_log_probs(batch: DataProto, report: Report) -> None:
    """Prints in one line a row how far the recorded log-probs are from the model's, in nats."""
    if "rollout_log_probs" not in batch.batch:
        report("rollout.calculate_log_probs=false: there are no recorded log-probs to compare")
        return
    report(
        "log-probs of the record and of the config's model, "
        "which agree only where these weights generated the episodes"
    )
    mask = batch.batch["response_mask"].bool()
    gaps = (batch.batch["rollout_log_probs"] - batch.batch["old_log_probs"]).abs()
    columns = batch.non_tensor_batch
    names = zip(columns["episode_id"], columns["episode_row"], strict=True)
    for i, (episode, row) in enumerate(names):
        gap = gaps[i][mask[i]]  # (tokens of the policy,)
        shown = "nothing to train on"
        if len(gap):
            shown = f"mean {gap.mean():.2e}, max {gap.max():.2e}"
        report(f"  episode {episode}, row {row}: {len(gap)} tokens, {shown}")
