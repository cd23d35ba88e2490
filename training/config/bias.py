"""Finds the row of the bias table that a configuration trains with: the last line of `--explain`.

`scripts/bias_table.py` computes the table and writes it beside itself; an installed package does
not have it.
"""

import csv
from pathlib import Path

from training.config.schema.algorithm import RolloutCorrectionConfig
from training.config.schema.ppo import PPOConfig

TABLE = Path(__file__).resolve().parents[2] / "scripts/bias_table.csv"
# The age of the table's samples, in the order of its columns: MODE/0, MODE/1, MODE/2.
AGES = ("fresh samples", "samples one update old", "samples two updates old")
# The one form of rejection that the table has.
SEQUENCE_REJECTION = RolloutCorrectionConfig(
    rollout_rs="seq_mean_k1", rollout_rs_threshold="0.8_1.25"
)
# (estimator, loss, correction)
Combination = tuple[str, str, str]


def bias_line(config: PPOConfig) -> str | None:
    """Describes the row of the configured estimator, loss, aggregation and correction in one line.

    Returns None where the table is not there.
    """
    if not TABLE.is_file():
        return None
    table = _read_table()
    combination = _combination(config, table)
    if combination not in table:
        return f"bias: {', '.join(combination)} was not enumerated (docs/bias.md)"
    estimator, loss, correction = combination
    mode = _column_mode(config)
    row = table[combination]
    cells = [f"{age}: {_in_words(row[f'{mode}/{stale}'])}" for stale, age in enumerate(AGES)]
    corrected = "uncorrected" if correction == "old" else f"rollout correction {correction}"
    return (
        f"bias of {estimator}, {loss}, {mode}, {corrected}, on a toy MDP, groups of 4, "
        "all else at its default (docs/bias.md), measured against the policy gradient (an unbiased "
        f"estimate has cosine 1 and length ratio 1): {'; '.join(cells)}"
    )


def _in_words(cell: str) -> str:
    """Names the two numbers of a cell of the table, "COSINE RATIO"."""
    cosine, ratio = cell.split()
    return f"cosine {cosine}, length ratio {ratio}"


def _read_table() -> dict[Combination, dict[str, str]]:
    """Reads the rows of the table: MODE/STALE -> "COSINE RATIO"."""
    with TABLE.open(encoding="utf-8") as file:
        return {
            (row["estimator"], row["loss"], row["correction"]): row for row in csv.DictReader(file)
        }


def _combination(config: PPOConfig, table: dict[Combination, dict[str, str]]) -> Combination:
    """Names what the config trains with as the table does."""
    algorithm = config.algorithm
    correction = config.with_correction.algorithm.rollout_correction
    loss = config.loss_mode
    # The bypassed PPO clip is the vanilla loss with the engine's log-probs for the old ones.
    if correction.bypass_mode and correction.loss_type == "ppo_clip":
        loss = "vanilla"
    estimator = algorithm.adv_estimator.removesuffix("_vectorized")
    without_std = f"{estimator} no_std"
    if not algorithm.norm_adv_by_std_in_grpo and (without_std, loss, "old") in table:
        estimator = without_std
    return estimator, loss, _correction_name(correction)


def _correction_name(correction: RolloutCorrectionConfig) -> str:
    """Names the correction as the table does, where weights have the table's limits or others."""
    if correction.rollout_rs or correction.rollout_token_veto_threshold:
        if correction == SEQUENCE_REJECTION:
            return "sequence rejection"
        return "rejection of another kind"
    if correction.rollout_is is None:
        return "old"
    has_band = "_" in correction.rollout_is_threshold
    return f"{correction.rollout_is} band" if has_band else correction.rollout_is


def _column_mode(config: PPOConfig) -> str:
    """Names the aggregation whose columns hold for the configured one."""
    mode = config.actor_rollout_ref.actor.aggregation
    # The table leaves out modes with the direction of seq-mean-token-sum.
    return mode if mode.endswith("token-mean") else "seq-mean-token-sum"
