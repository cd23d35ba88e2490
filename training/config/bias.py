"""Reads the bias table (bias.csv, made by scripts/bias_table.py): how far a combination is from the policy gradient."""

import csv
from pathlib import Path

from training.config.algorithm_settings import RolloutCorrectionConfig
from training.config.settings import PPOConfig

SEQUENCE_REJECTION = RolloutCorrectionConfig(rollout_rs="seq_mean_k1", rollout_rs_threshold="0.8_1.25")
# Of the samples, as columns of the table.
AGES = ("of fresh samples", "one update later", "two updates later")


def bias_line(config: PPOConfig) -> str:
    """Tells the row of the configured estimator, loss, aggregation and correction in one line."""
    correction = config.algorithm.rollout_correction
    reinforces = correction.bypass_mode and correction.loss_type == "reinforce"
    actor, estimator = config.actor_rollout_ref.actor, config.algorithm.adv_estimator.removesuffix("_vectorized")
    loss = "bypass_mode" if reinforces else "vanilla" if correction.bypass_mode else actor.policy_loss.loss_mode
    with Path(__file__).with_name("bias.csv").open() as file:
        table = {(row["estimator"], row["loss"], row["correction"]): row for row in csv.DictReader(file)}
    plain = f"{estimator} no_std"
    if not config.algorithm.norm_adv_by_std_in_grpo and (plain, loss, "old") in table:
        estimator = plain
    mode = actor.loss_agg_mode
    # The others have its direction.
    column = mode if mode.endswith("token-mean") else "seq-mean-token-sum"
    key = (estimator, loss, _form(correction))
    if key not in table:
        return f"bias: {', '.join(key)} was not enumerated (docs/algorithms.md)"
    told = [f"{table[key][f'{column}/{stale}']} {age}" for stale, age in enumerate(AGES)]
    named = f"{estimator}, {loss}, {column}, " + (f"rollout correction {key[2]}" if key[2] != "old" else "uncorrected")
    toy = "on a toy MDP, groups of 4, all else at its default (docs/algorithms.md)"
    return f"bias of {named}, {toy}: cosine to the policy gradient and length in lengths of it {'; '.join(told)}"


def _form(correction: RolloutCorrectionConfig) -> str:
    """Names the correction as the table does; weights with other limits than its own are the nearest."""
    if correction.rollout_rs or correction.rollout_token_veto_threshold:
        return "sequence rejection" if correction == SEQUENCE_REJECTION else "rejection of another kind"
    band = " band" if "_" in correction.rollout_is_threshold else ""
    return "old" if correction.rollout_is is None else correction.rollout_is + band
