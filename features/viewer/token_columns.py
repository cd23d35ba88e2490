"""Puts what was recorded of an episode's tokens, at generation and in the update, side by side.

Invariant: a column that is offered has one entry for each token of the row's response, and is the
recorded one, bit for bit; `fate` says of every token why it was trained on or not.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from features.viewer.credit_path import EpisodeTokens
from features.viewer.records import RecordedEpisode, RecordedRow
from features.viewer.update_columns import UpdateColumns

# Fates that a page gives where no update was recorded.
OWN_FATES = {
    "environment": "The environment wrote it: the policy reads it and is not trained on it.",
    "template": "The chat template wrote it: nobody sampled it, so it is not trained on.",
    "validation": "It was generated to be evaluated, not to be trained on.",
    "unrecorded": "What the update did with it was not recorded.",
    "dropped": "Its episode never reached the update.",
}
# The sentence of each column, unless the run has its own.
COLUMNS = {
    "log_probs": "The engine's log-prob when it sampled the token, nats.",
    "rewards": "The environment's or the reward function's reward at the token.",
    "turn_ids": "The turn that sampled it; -1: nobody sampled it.",
    "sampled": "1 where the policy sampled the token.",
    "template_mask": "1 where the chat template added the token.",
    "weight_versions": "The step whose weights sampled it.",
    "response_mask": "What the loss multiplied with: 0 leaves the token out.",
    "token_level_scores": "The reward at the token, before any KL term.",
    "token_level_rewards": "The reward at the token, less the KL term: what estimators see.",
    "old_log_probs": "The trainer's log-prob before the step's update, nats.",
    "rollout_log_probs": "The engine's log-prob, nats.",
    "ref_log_prob": "The reference policy's log-prob, nats.",
    "values": "The critic's value before the token.",
    "returns": "The critic's target at the token.",
    "advantages": "What the loss weighs the token's log-prob with.",
    "rollout_is_weights": "Importance weight of trainer against engine.",
    "log_prob": "The policy's log-prob in the last pass of the update, nats.",
    "entropy": "The policy's entropy at the token in that pass, nats.",
    "policy_weight": "Minus the derivative of the loss by the token's log-prob in that pass.",
    "fate": "Why the token was trained on, or not.",
}


# What stands on a page for columns of a type that it cannot hold, or that it holds otherwise.
SHOWN_DTYPES = {
    np.dtype(np.bool_): np.int8,
    np.dtype(np.int64): np.float64,
    np.dtype(np.uint64): np.float64,
    np.dtype(np.float16): np.float32,
}


@dataclass
class FateNames:
    """Numbers the fates of all steps alike, in the order in which they are met."""

    sentences: dict[str, str] = field(default_factory=dict)

    def number(self, name: str, sentence: str = "") -> int:
        """Returns the number of a fate, a new one where it is met for the first time."""
        if name not in self.sentences:
            self.sentences[name] = sentence or OWN_FATES.get(name, "")
        return list(self.sentences).index(name)

    def table(self, meta_fates: Mapping[str, Mapping[str, str]]) -> np.ndarray:
        """Returns for each code of a step's `fates` its number: (256,) uint8."""
        numbers = np.full(256, self.number("unrecorded"), dtype=np.uint8)
        for code, fate in meta_fates.items():
            if code.isdigit() and int(code) < len(numbers) and isinstance(fate, dict):
                name, sentence = str(fate.get("name", code)), str(fate.get("sentence", ""))
                numbers[int(code)] = self.number(name, sentence)
        return numbers


@dataclass(frozen=True)
class StepUpdate:
    """Holds a step's columns as far as single episodes are looked up in them."""

    columns: UpdateColumns
    places: dict[tuple[str, int], int]
    fates: np.ndarray
    dropped: dict[str, str]

    @classmethod
    def of(cls, columns: UpdateColumns, names: FateNames) -> "StepUpdate":
        """Indexes the columns."""
        fates = columns.meta.get("fates")
        table = names.table(fates if isinstance(fates, dict) else {})
        return cls(columns, columns.find_rows(), table, columns.dropped())


@dataclass(frozen=True)
class ShownTokens:
    """Holds a row's token columns; `place` is its number in the update, None: it is not in it."""

    columns: dict[str, np.ndarray]
    place: int | None


def token_columns(
    episode: RecordedEpisode, update: StepUpdate | None, kind: str, names: FateNames
) -> tuple[list[ShownTokens], list[str]]:
    """Returns the token columns of each row, and what did not fit, in sentences."""
    rows, faults = [], []
    for number, row in enumerate(episode.rows):
        columns = {
            "turn_ids": row.tokens["turn_ids"],
            "sampled": row.tokens["response_mask"],
            "log_probs": row.tokens["log_probs"],
            "rewards": row.tokens["rewards"],
        }
        for name in ("template_mask", "weight_versions"):
            if name in row.tokens:
                columns[name] = row.tokens[name]
        place = None
        if update is not None:
            place = update.places.get((episode.episode_id, number))
        if place is not None and update is not None:
            offsets = update.columns.offsets
            length = int(offsets[place + 1] - offsets[place])
            if length != len(row):
                faults.append(
                    f"row {number} has {len(row)} tokens, and {length} in the update: "
                    "its columns are left out"
                )
                place = None
        if place is not None and update is not None:
            of_update = update.columns.of_row(place)
            if "fate" in of_update:
                of_update["fate"] = update.fates[of_update["fate"].astype(np.uint8)]
            columns.update(of_update)
        if "fate" not in columns:
            columns["fate"] = guess_fates(row, _why_not(episode, update, kind), names)
        rows.append(ShownTokens(_typed(columns), place))
    return rows, faults


def _why_not(episode: RecordedEpisode, update: StepUpdate | None, kind: str) -> str:
    """Names the fate of sampled tokens that are in no update."""
    if kind == "val":
        return "validation"
    if update is not None and episode.episode_id in update.dropped:
        return update.dropped[episode.episode_id] or "dropped"
    return "unrecorded"


def guess_fates(row: RecordedRow, sampled_fate: str, names: FateNames) -> np.ndarray:
    """Returns the fates of a row that is in no update: (response length,) uint8."""
    fates = np.full(len(row), names.number("environment"), dtype=np.uint8)
    if "template_mask" in row.tokens:
        fates[row.tokens["template_mask"] > 0] = names.number("template")
    fates[row.tokens["response_mask"] > 0] = names.number(sampled_fate)
    return fates


def _typed(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the columns in types that a page can hold; 64-bit integers become doubles."""
    typed = {}
    for name, column in columns.items():
        shown = SHOWN_DTYPES.get(column.dtype)
        typed[name] = column if shown is None else column.astype(shown)
    return typed


def join_rows(rows: list[ShownTokens]) -> EpisodeTokens | None:
    """Puts the rows that the update had behind each other; None where it had none."""
    updated = [row for row in rows if row.place is not None]
    if not updated:
        return None
    shared = set.intersection(*(set(row.columns) for row in updated))
    needed = {"response_mask", "advantages", "returns", "token_level_scores", "token_level_rewards"}
    if not needed <= shared:
        return None
    if len(updated) == 1:
        columns = {name: updated[0].columns[name] for name in shared}
    else:
        columns = {name: np.concatenate([row.columns[name] for row in updated]) for name in shared}
    places = [row.place for row in updated if row.place is not None]
    return EpisodeTokens(columns, sampled=columns["response_mask"] > 0, rows=places)
