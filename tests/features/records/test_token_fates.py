"""Why a token was or was not trained on, by each of the things that can have happened to it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from features.records.token_fates import BY_NAME, FATES, StepTokens, token_fates
from features.records.token_origins import ENVIRONMENT, OVER_LIMIT, SAMPLED, TEMPLATE


def one_token(**differs: object) -> StepTokens:
    """A single token of a single row, which was trained on but for what differs."""
    usual = StepTokens(
        rows=np.array([0]),
        origins=np.array([SAMPLED]),
        response_mask=np.array([1]),
        advantages=np.array([0.5]),
        policy_weight=np.array([0.01]),
        turn_ids=np.array([0]),
        weights_are_zero=np.array([False]),
        is_rejected_in_loss=np.array([False]),
        times_trained=np.array([1]),
        is_skipped=np.array([False]),
        is_stale=np.array([False]),
        has_no_spread=np.array([False]),
        corrects=False,
        updates_policy=True,
    )
    arrays = {
        name: value if isinstance(value, bool) or value is None else np.array([value])
        for name, value in differs.items()
    }
    for name in ("weights_are_zero", "is_rejected_in_loss", "is_skipped", "is_stale"):
        if name in differs:
            arrays[name] = np.array([differs[name]])
    if "has_no_spread" in differs:
        arrays["has_no_spread"] = np.array([differs["has_no_spread"]])
    return replace(usual, **arrays)


OUT = {"response_mask": 0, "policy_weight": 0.0, "advantages": 0.0}
CASES = [
    ("trained", {}),
    ("trained", {"advantages": 0.0, "policy_weight": 1e-9}),
    ("trained", {"policy_weight": None}),
    ("clipped", {"policy_weight": 0.0}),
    ("rejected", {"policy_weight": 0.0, "weights_are_zero": True}),
    ("rejected", {"policy_weight": 0.0, "is_rejected_in_loss": True}),
    ("no_spread", {"policy_weight": 0.0, "advantages": 0.0, "has_no_spread": True}),
    ("zero_advantage", {"policy_weight": 0.0, "advantages": 0.0}),
    ("zero_advantage", {"policy_weight": None, "advantages": 0.0}),
    ("warmup", {"policy_weight": None, "updates_policy": False, "times_trained": None}),
    ("not_drawn", {"times_trained": 0, "policy_weight": 0.0}),
    ("skipped", {"is_skipped": True, "policy_weight": np.nan}),
    ("environment", OUT | {"origins": ENVIRONMENT, "turn_ids": -1}),
    ("environment", OUT | {"origins": ENVIRONMENT, "turn_ids": -1, "corrects": True}),
    ("observed", OUT | {"origins": ENVIRONMENT, "turn_ids": -1, "policy_weight": 0.1}),
    ("template", OUT | {"origins": TEMPLATE, "turn_ids": -1}),
    ("over_limit", OUT | {"origins": OVER_LIMIT, "turn_ids": -1}),
    ("masked_failure", OUT | {"turn_ids": -1, "is_stale": True}),
    ("stale", OUT | {"is_stale": True, "corrects": True}),
    ("rejected", OUT | {"corrects": True}),
    ("masked", OUT),
]


@pytest.mark.parametrize(("fate", "differs"), CASES)
def test_a_token_has_the_fate_of_what_happened(fate: str, differs: dict[str, object]) -> None:
    [code] = token_fates(one_token(**differs))
    assert FATES[code].name == fate


def test_the_table_has_one_code_a_name_and_a_sentence_for_each() -> None:
    assert [fate.code for fate in FATES] == list(range(len(FATES)))
    assert len(BY_NAME) == len(FATES)
    assert all(fate.sentence.endswith(".") for fate in FATES)
