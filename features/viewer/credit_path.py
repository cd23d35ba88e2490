"""Tells how an episode's reward became its advantage, in the words of the run's estimator.

A path is a list of stages (label, number, sentence), a table of the group where the estimator
compares one, and a table of turns. No estimator is known here: the formula's text, and what it
compares, are what it says where it is registered (`EstimatorFacts`). Invariant: numbers that are
called recorded come from the columns of the update; all others are statistics of those.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from features.viewer.credit_turns import turn_table
from features.viewer.records import RecordedEpisode
from features.viewer.step_credit import StepCredit

Stage = tuple[str, float | str, str]
# Rewards that differ by less are equal.
SMALLEST_DIFFERENCE = 1e-6


@dataclass(frozen=True)
class EpisodeTokens:
    """Holds an episode's tokens of all its rows, one behind the other, as the update saw them.

    Attributes:
        columns: by name (T,); `turn_ids` are the record's.
        sampled: (T,) bool, on what the loss took as sampled.
        rows: the numbers of its rows in the columns of the step.
    """

    columns: dict[str, np.ndarray]
    sampled: np.ndarray
    rows: list[int]

    def sum(self, name: str) -> float:
        """Sums a column over sampled tokens; NaN where it was not recorded."""
        if name not in self.columns:
            return float("nan")
        return float(self.columns[name][self.sampled].sum(dtype=np.float64))


def credit_path(
    episode: RecordedEpisode, tokens: EpisodeTokens | None, credit: StepCredit | None
) -> dict[str, Any]:
    """Returns what a page shows of an episode's way from reward to gradient."""
    stages = reward_stages(episode)
    if tokens is None or credit is None:
        return {
            "estimator": "",
            "formula": "",
            "stages": stages,
            "notes": overflow_note(episode),
        }
    stages += score_stages(tokens)
    stages += estimator_stages(episode, tokens, credit)
    stages += loss_stages(tokens, credit)
    notes = overflow_note(episode)
    if credit.failure:
        notes.append(credit.failure)
    check = check_against_record(tokens, credit)
    if check is not None and not check["agrees"]:
        notes.append(
            f"computed again the advantages differ from those recorded by up to "
            f"{check['difference']:.3g}"
        )
    return {
        "estimator": credit.estimator,
        "formula": credit.facts.formula,
        "stages": stages,
        "notes": notes,
        "check": check,
        "members": group_table(episode, credit),
        "turns": turn_table(tokens.columns, tokens.sampled, credit, episode),
    }


def overflow_note(episode: RecordedEpisode) -> list[str]:
    """Says where an episode that overflowed has another reward than it was paid."""
    added = episode.number("reward") - episode.number("paid")
    if episode.text("ending") != "overflow" or not abs(added) > SMALLEST_DIFFERENCE:
        return []
    return [f"It overflowed, and agent.overflow_reward added {added:.4g} to what it was paid."]


def reward_stages(episode: RecordedEpisode) -> list[Stage]:
    """Returns what the environment paid, and what is trained on of it."""
    stages: list[Stage] = []
    if "paid" in episode.entries:
        stages.append(
            ("paid", episode.number("paid"), "what the environment or the reward function gave")
        )
    stages.append(("reward", episode.number("reward"), "what is trained on of it"))
    return stages


def score_stages(tokens: EpisodeTokens) -> list[Stage]:
    """Returns the score, what was taken off each token, and what estimators saw."""
    stages: list[Stage] = []
    score, rewards = tokens.sum("token_level_scores"), tokens.sum("token_level_rewards")
    stages.append(("score", score, "sum of token_level_scores over its sampled tokens"))
    if abs(rewards - score) > 0:
        stages.append(("KL term", rewards - score, "token_level_rewards less token_level_scores"))
    stages.append(("return", rewards, "sum of token_level_rewards, which the estimator saw"))
    return stages


def estimator_stages(
    episode: RecordedEpisode, tokens: EpisodeTokens, credit: StepCredit
) -> list[Stage]:
    """Returns what the estimator compared the episode with: its group, and the critic's value."""
    stages: list[Stage] = []
    place = credit.place_of_episode.get(episode.episode_id)
    compares_scores = credit.facts.compares in ("group", "states")
    if compares_scores and place is not None and credit.groups is not None:
        stages += group_stages(place, credit)
    if "values" in tokens.columns and tokens.sampled.any():
        values = tokens.columns["values"][tokens.sampled]
        stages.append(("value", float(values[0]), "the critic's, before the first sampled token"))
        raw = (tokens.columns["returns"] - tokens.columns["values"])[tokens.sampled]
        mean = float(raw.mean(dtype=np.float64))
        stages.append(("raw advantage", mean, "mean over its tokens, before whitening"))
        stages += whitening_stages(credit)
    return stages


def whitening_stages(credit: StepCredit) -> list[Stage]:
    """Returns what the advantages of a run with a critic were whitened with."""
    is_recorded = credit.batch is not None and {"values", "returns"} <= credit.columns.tokens.keys()
    if not is_recorded or not credit.facts.whitens_batch:
        return []
    mean, std = credit.batch_whitening
    return [
        ("batch mean", mean, "of raw advantages over the batch's tokens: subtracted"),
        ("batch spread", std, "their standard deviation: divided by"),
    ]


def group_stages(place: int, credit: StepCredit) -> list[Stage]:
    """Returns the group's size, mean and spread."""
    size, is_valid, mean, spread = credit.group_numbers[place]
    stages: list[Stage] = [("group", int(size), "members with a sampled token")]
    if not is_valid:
        stages.append(("left out", "yes", "no token of it is sampled: it leaves the group's mean"))
    stages.append(("group mean", mean, "mean of the group's scores"))
    stages.append(("spread", spread, "unbiased standard deviation of the group's scores"))
    return stages


def loss_stages(tokens: EpisodeTokens, credit: StepCredit) -> list[Stage]:
    """Returns the recorded advantage, and what the loss made of it."""
    stages: list[Stage] = []
    advantages = tokens.columns["advantages"][tokens.sampled]
    if len(advantages):
        mean = float(advantages.mean(dtype=np.float64))
        low, high = float(advantages.min()), float(advantages.max())
        where = "on every sampled token" if low == high else f"from {low:.4g} to {high:.4g}"
        stages.append(("advantage", mean, f"as recorded: mean over its sampled tokens, {where}"))
    else:
        stages.append(("advantage", "none", "the loss saw no sampled token of it"))
    if "policy_weight" in tokens.columns:
        weights = tokens.columns["policy_weight"].astype(np.float64)
        share = float(np.abs(weights).sum() / max(credit.total_policy_weight, 1e-300))
        stages.append(
            ("policy weight", float(weights.sum()), "sum of minus d loss / d log-prob, last pass")
        )
        stages.append(("its share", share, "of the step's absolute policy weights"))
    if "gradient_share" in credit.columns.rows:
        shares = credit.columns.rows["gradient_share"][tokens.rows]
        stages.append(
            ("gradient share", float(shares.sum()), "of the step's gradient, as recorded")
        )
    return stages


def group_table(episode: RecordedEpisode, credit: StepCredit) -> dict[str, Any] | None:
    """Returns the members of the episode's group: score, tokens, deviation, advantage."""
    place = credit.place_of_episode.get(episode.episode_id)
    if place is None or credit.groups is None or credit.episodes is None or credit.batch is None:
        return None
    uid = str(credit.batch.non_tensor_batch["uid"][credit.episodes.first[place]])
    return {"uid": uid, "rows": [credit.member_rows[member] for member in credit.members[uid]]}


def check_against_record(tokens: EpisodeTokens, credit: StepCredit) -> dict[str, Any] | None:
    """Compares the advantages of one episode with those computed again; None where none were."""
    computed = credit.advantages
    if computed is None:
        return None
    offsets = credit.columns.offsets
    again = np.concatenate([computed[offsets[row] : offsets[row + 1]] for row in tokens.rows])
    recorded = tokens.columns["advantages"]
    differences = np.abs(again.astype(np.float64) - recorded)[tokens.sampled]
    difference = float(differences.max(initial=0.0))
    scale = float(np.abs(recorded[tokens.sampled]).max(initial=0.0))
    mean = float(again[tokens.sampled].mean(dtype=np.float64)) if tokens.sampled.any() else 0.0
    agrees = difference <= 1e-5 + 1e-4 * scale or math.isnan(scale)
    return {"computed": mean, "difference": difference, "agrees": agrees}
