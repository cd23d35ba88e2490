"""Columns of STEP.npz: the inputs of a step's update, and its results.

    rows      r0        r1    r2
    offsets   0         3     5       9
    tokens    a  a  a | b b | c c c c

A row column has an entry a row, a token column one for each token of the responses, row by row.
features/records/README.md lists them. Invariant: numbers are those of the batch that was trained
on, in its order; dummy rows are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from data.protocol import DUMMY_UID, DataProto
from features.records.settings import RecordsSettings
from features.records.token_fates import FATES, StepTokens, rejected_in_loss, token_fates
from features.records.token_origins import ENVIRONMENT, SAMPLED
from features.records.token_record import UpdateRecord
from training.config import PPOConfig

FORMAT = 1
Columns = dict[str, np.ndarray]

# Token columns of the batch, with what they hold.
BATCH_COLUMNS = {
    "response_mask": "1 on tokens that the loss saw",
    "advantages": "advantage, 0 outside response_mask",
    "returns": "what a critic is to predict, 0 outside response_mask",
    "token_level_scores": "reward as given, before any KL term",
    "token_level_rewards": "reward less the KL term, if there is one",
    "old_log_probs": "the trainer's log-prob before the step's update, nats",
    "rollout_log_probs": "the engine's log-prob, nats",
    "ref_log_prob": "the reference policy's log-prob, nats",
    "values": "the critic's value",
    "rollout_is_weights": "importance weight of trainer against engine",
    "weight_versions": "step whose weights sampled the token, -1 on what nobody sampled",
}
NEEDED = ("response_mask", "advantages", "returns", "token_level_scores", "token_level_rewards")
INTEGER_COLUMNS = {"response_mask": "<i1", "weight_versions": "<i4"}
# Token columns of the update, with what they hold.
UPDATE_COLUMNS = {
    "log_prob": (
        "the policy's log-prob in the last pass over the row, nats; it is the old one where there "
        "is no old_log_probs; 0 outside response_mask"
    ),
    "entropy": "the policy's entropy in that pass, nats; 0 outside response_mask",
    "policy_weight": (
        "minus the derivative of the mini-batch's whole loss (policy, KL and observation terms, "
        "divided as loss_agg_mode says, before the gradient is clipped by its norm) by log_prob in "
        "that pass; the entropy bonus reaches a token by its entropy, and is not in it"
    ),
    "rollout_is_weights": BATCH_COLUMNS["rollout_is_weights"],
}
ROW_COLUMNS = {
    "episode_id": "the episode that the row is of",
    "uid": "its group",
    "episode_row": "number of the row in its episode",
    "offsets": "where each row's tokens begin in the token columns, and the end of the last",
    "times_trained": "passes of the step's update over the row",
    "gradient_share": (
        "<g_row, G> / ||G||^2 of each update, added up: 1 in all rows of an update together"
    ),
    "reward_baselines": "reward of a greedy answer to the same prompt",
    "role": "the policy that plays, for estimators with a baseline for each",
}


# Settings in `meta`.
ALGORITHM_SETTINGS = ("adv_estimator", "gamma", "lam", "norm_adv_by_std_in_grpo")
ACTOR_SETTINGS = ("clip_ratio_c", "entropy_coeff")
CORRECTION_SETTINGS = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_rs",
    "rollout_rs_threshold",
    "rollout_token_veto_threshold",
    "bypass_mode",
    "loss_type",
)


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """Holds a step that was trained on, as it is to be recorded.

    Attributes:
        step: its number.
        batch: as the update was given it.
        records: what each rank's update recorded.
        updates_policy: false while only the critic learns.
        stale: uids of groups that are too old.
        dropped: episodes that never reached the update.
        metrics: of the step.
    """

    step: int
    batch: DataProto
    records: Sequence[UpdateRecord | None] = ()
    updates_policy: bool = True
    stale: frozenset[str] = frozenset()
    dropped: Sequence[Mapping[str, str]] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


def step_arrays(trained: TrainedStep, config: PPOConfig) -> Columns:
    """Makes all that STEP.npz holds of a step, by name."""
    rows = StepRows(trained.batch)
    columns = rows.columns()
    tokens = rows.tokens()
    update = _joined_records(trained.records, rows)
    columns["times_trained"] = update.times_trained
    if config.section(RecordsSettings).gradients:
        columns["gradient_share"] = update.gradient_shares
    tokens |= update.tokens
    step_tokens = _step_tokens(trained, config, rows, tokens, update)
    tokens["fate"] = token_fates(step_tokens)
    columns |= tokens
    columns["meta"] = np.array(json.dumps(_meta(trained, config, rows, columns)))
    return columns


class StepRows:
    """Reads the real rows (n) of a batch, and their tokens, row by row (T)."""

    def __init__(self, batch: DataProto) -> None:
        self.others = batch.non_tensor_batch
        self.tensors = batch.tensors()
        uids = batch.non_tensor_batch["uid"]
        self.numbers = np.flatnonzero(uids.astype(object) != DUMMY_UID)
        width = self.tensors["responses"].shape[1]
        # (B, R), False in dummy rows.
        self.is_token = self.tensors["attention_mask"][:, -width:].numpy().astype(bool)
        is_real = np.zeros(len(uids), bool)
        is_real[self.numbers] = True
        self.is_token &= is_real[:, None]
        self.lengths = self.is_token.sum(axis=1)[self.numbers]
        self.offsets = np.concatenate([[0], self.lengths.cumsum()]).astype(np.int64)
        self.uids = self._texts("uid", "row ")
        self.episode_ids = self._texts("episode_id", "row ")
        # The row of each token.
        self.of_token = np.repeat(np.arange(len(self.numbers)), self.lengths)

    def flat(self, tensor: Tensor) -> np.ndarray:
        """Returns the tokens' entries of (B, R), (T,)."""
        return tensor.float().numpy()[self.is_token]

    def padded(self, flat: np.ndarray) -> np.ndarray:
        """Undoes `flat`: (B, R), 0 elsewhere."""
        matrix = np.zeros(self.is_token.shape, flat.dtype)
        matrix[self.is_token] = flat
        return matrix

    def _texts(self, name: str, otherwise: str) -> np.ndarray:
        """Returns a column of names; without it `otherwise` and the row's number."""
        column = self.others.get(name)
        if column is None:
            return np.array([f"{otherwise}{row}" for row in self.numbers], dtype=np.str_)
        return np.array([str(value) for value in column[self.numbers]], dtype=np.str_)

    def columns(self) -> Columns:
        """Returns the row columns that the batch has."""
        rows = len(self.numbers)
        columns: Columns = {
            "episode_id": self.episode_ids,
            "uid": self.uids,
            "episode_row": np.zeros(rows, np.int64),
            "offsets": self.offsets,
        }
        if "episode_row" in self.others:
            columns["episode_row"] = self.others["episode_row"][self.numbers].astype(np.int64)
        if "reward_baselines" in self.tensors:
            baselines = self.tensors["reward_baselines"].float().numpy()
            columns["reward_baselines"] = baselines[self.numbers]
        if "role" in self.others:
            columns["role"] = self._texts("role", "")
        return columns

    def tokens(self) -> Columns:
        """Returns the token columns that the batch has."""
        columns = {}
        for name in BATCH_COLUMNS:
            if name in self.tensors:
                dtype = INTEGER_COLUMNS.get(name, "<f4")
                columns[name] = self.flat_as(self.tensors[name], dtype)
        return columns

    def flat_as(self, tensor: Tensor, dtype: str) -> np.ndarray:
        """Returns the tokens' entries of (B, R) in a dtype: (T,)."""
        if dtype == "<f4":
            return self.flat(tensor)
        return tensor.numpy()[self.is_token].astype(dtype)


@dataclass(frozen=True)
class JoinedRecords:
    """Holds what all ranks' updates recorded, in the order of the batch's rows.

    `has_records` is False where no rank recorded anything, as in a step that only the critic
    learns from.
    """

    has_records: bool
    tokens: Columns
    times_trained: np.ndarray
    is_skipped: np.ndarray
    gradient_shares: np.ndarray


def _joined_records(records: Sequence[UpdateRecord | None], rows: StepRows) -> JoinedRecords:
    """Brings the ranks' records in the order of the batch; of a row's passes the last counts."""
    count = len(rows.numbers)
    there = [record for record in records if record is not None]
    times_trained = np.zeros(count, np.int64)
    shares = np.zeros(count, np.float64)
    is_skipped = np.zeros(count, bool)
    if not there or "row_number" not in rows.tensors:
        return JoinedRecords(False, {}, times_trained, is_skipped, shares)
    numbers = rows.tensors["row_number"].numpy()[rows.numbers].tolist()
    place_of = {number: place for place, number in enumerate(numbers)}
    last_pass = np.full(count, -1, np.int64)
    places_of = []
    for record in there:
        for number, times in record.times_trained.items():
            times_trained[place_of[number]] += times
        for number, share in record.gradient_shares.items():
            shares[place_of[number]] += share
        places = np.array([place_of[number] for number in record.row_numbers.tolist()], np.int64)
        places_of.append(places)
        np.maximum.at(last_pass, places, record.passes)
    names = [name for name in UPDATE_COLUMNS if all(name in r.tokens for r in there)]
    tokens = {name: np.zeros(len(rows.of_token), np.float32) for name in names}
    for record, places in zip(there, places_of, strict=True):
        is_last = record.passes == last_pass[places]
        is_skipped[places[is_last]] = np.isin(record.passes[is_last], record.skipped)
        is_of_last, targets = _tokens_of_passes(record, is_last, rows.offsets[places])
        for name, values in tokens.items():
            recorded = record.tokens[name][is_of_last]
            if name == "policy_weight":
                # A row that one pass has several times (use_pf_ppo) is trained on by their sum.
                np.add.at(values, targets, recorded)
            else:
                values[targets] = recorded
    return JoinedRecords(True, tokens, times_trained, is_skipped, shares)


def _tokens_of_passes(
    record: UpdateRecord, is_chosen: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the tokens of chosen passes among the record's, and among those of the step.

    Args:
        is_chosen: (P,) bool.
        offsets: (P,) where the tokens of each pass's row begin in the step's columns.

    Returns:
        (T,) bool of the record's tokens, and the places in the columns of those that are chosen.
    """
    is_token = np.repeat(is_chosen, record.lengths)
    begins = np.cumsum(record.lengths) - record.lengths
    places = np.arange(len(is_token)) + np.repeat(offsets - begins, record.lengths)
    return is_token, places[is_token]


def _step_tokens(
    trained: TrainedStep,
    config: PPOConfig,
    rows: StepRows,
    tokens: Columns,
    update: JoinedRecords,
) -> StepTokens:
    """Collects what the fates of the tokens are decided by."""
    fields = rows.tensors
    correction = config.algorithm.rollout_correction
    nothing = np.zeros(len(rows.of_token), bool)
    mask = tokens["response_mask"]
    turn_ids = rows.flat_as(fields["turn_ids"], "<i2") if "turn_ids" in fields else mask - 1
    if "token_origins" in fields:
        origins = rows.flat_as(fields["token_origins"], "<i1")
    else:
        origins = np.where((turn_ids >= 0) | (mask > 0), SAMPLED, ENVIRONMENT)
    weights_are_zero = nothing
    if "rollout_is_weights" in tokens:
        weights_are_zero = tokens["rollout_is_weights"] == 0
    rejected = nothing
    if correction.bypass_mode and "log_prob" in tokens and "rollout_log_probs" in tokens:
        rejected = rejected_in_loss(
            correction,
            rows.padded(tokens["log_prob"]),
            rows.padded(tokens["rollout_log_probs"]),
            rows.padded(mask),
        )[rows.is_token]
    return StepTokens(
        rows=rows.of_token,
        origins=origins,
        response_mask=mask,
        advantages=tokens["advantages"],
        policy_weight=tokens.get("policy_weight"),
        turn_ids=turn_ids,
        weights_are_zero=weights_are_zero,
        is_rejected_in_loss=rejected,
        times_trained=update.times_trained if update.has_records else None,
        is_skipped=update.is_skipped,
        is_stale=np.array([uid in trained.stale for uid in rows.uids.tolist()], bool),
        has_no_spread=_without_spread(rows, tokens),
        corrects=correction.corrects,
        updates_policy=trained.updates_policy,
    )


def _without_spread(rows: StepRows, tokens: Columns) -> np.ndarray:
    """Tells of each row (n,) whether the scores of its group's episodes are equal.

    An episode without a token in the loss does not count, and a group of one has no spread to lack.
    """
    count = len(rows.numbers)
    scores = np.bincount(rows.of_token, tokens["token_level_scores"], minlength=count)
    is_live = np.bincount(rows.of_token, tokens["response_mask"] > 0, minlength=count) > 0
    groups: dict[str, dict[str, float]] = {}
    live: dict[str, set[str]] = {}
    uids = rows.uids.tolist()
    names = rows.episode_ids.tolist()
    scored_rows = zip(uids, names, scores.tolist(), is_live.tolist(), strict=True)
    for uid, name, score, lives in scored_rows:
        episodes = groups.setdefault(uid, {})
        episodes[name] = episodes.get(name, 0.0) + score
        if lives:
            live.setdefault(uid, set()).add(name)
    equal = set()
    for uid, episodes in groups.items():
        members = live.get(uid, set())
        if len(members) > 1 and len({episodes[name] for name in members}) == 1:
            equal.add(uid)
    return np.array([uid in equal for uid in uids], bool)


def _meta(
    trained: TrainedStep, config: PPOConfig, rows: StepRows, columns: Columns
) -> dict[str, Any]:
    """Describes the step: its settings, columns, fates, metrics and what was left out."""
    algorithm = config.algorithm
    actor = config.actor_rollout_ref.actor
    correction = algorithm.rollout_correction
    said = ROW_COLUMNS | BATCH_COLUMNS | UPDATE_COLUMNS | {"fate": "why it was trained on, or not"}
    return {
        "format": FORMAT,
        "step": trained.step,
        # By name, as `--explain` takes what names a setting for what acts on it.
        **{name: algorithm[name] for name in ALGORITHM_SETTINGS},
        **{name: actor[name] for name in ACTOR_SETTINGS},
        "loss_mode": "bypass_mode" if correction["bypass_mode"] else config.loss_mode,
        "loss_agg_mode": actor.aggregation,
        "clip_ratio_low": _or_default(actor["clip_ratio_low"], actor["clip_ratio"]),
        "clip_ratio_high": _or_default(actor["clip_ratio_high"], actor["clip_ratio"]),
        "kl": {
            "in_reward": algorithm["use_kl_in_reward"],
            "penalty": algorithm["kl_penalty"],
            "in_loss": actor["use_kl_loss"],
            "loss_coef": actor["kl_loss_coef"],
            "loss_type": actor["kl_loss_type"],
            "reward_coef": trained.metrics.get("actor/reward_kl_penalty_coeff"),
        },
        "rollout_correction": {name: correction[name] for name in CORRECTION_SETTINGS},
        "fates": {str(fate.code): {"name": fate.name, "sentence": fate.sentence} for fate in FATES},
        "columns": {name: said[name] for name in columns},
        "metrics": {
            name: float(value) if math.isfinite(value) else str(float(value))
            for name, value in trained.metrics.items()
        },
        "dropped": [*trained.dropped, *_stale_episodes(trained, rows)],
    }


def _or_default(value: float | None, default: float) -> float:
    """Returns the value, or the default where there is none."""
    return default if value is None else value


def _stale_episodes(trained: TrainedStep, rows: StepRows) -> list[dict[str, str]]:
    """Lists the episodes of groups that are too old; they have rows, of which nothing is learnt."""
    if not trained.stale:
        return []
    uids = rows.uids.tolist()
    names = rows.episode_ids.tolist()
    uid_of = {name: uid for uid, name in zip(uids, names, strict=True) if uid in trained.stale}
    return [{"episode_id": name, "uid": uid, "why": "stale"} for name, uid in uid_of.items()]


def read_step_arrays(path: Any) -> tuple[dict[str, Any], Columns]:
    """Reads STEP.npz: its `meta`, and the columns by name.

    Raises:
        OSError, ValueError: it cannot be read, or is damaged.
    """
    with np.load(path, allow_pickle=False) as file:
        columns = {name: file[name] for name in file.files}
    meta = json.loads(str(columns.pop("meta")))
    return meta, columns
