"""The rules for advantages: what holds of any estimator, and what one says of itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from data.protocol import DataProto
from features.alarms.rules.advantages import advantage_faults
from training.batch.episode_rows import EpisodeRows
from training.core_algos import register_adv_est
from training.core_algos.registry import EstimatorFacts

GROUPS, MEMBERS, WIDTH = 4, 4, 3
ROWS = GROUPS * MEMBERS


def batch_of(scores: np.ndarray, advantages: np.ndarray) -> DataProto:
    """One number an episode; the last token is not sampled."""
    mask = torch.ones(ROWS, WIDTH, dtype=torch.int8)
    mask[:, -1] = 0
    rewards = torch.zeros(ROWS, WIDTH)
    rewards[:, 1] = torch.from_numpy(scores).float()
    spread = torch.from_numpy(advantages).float()[:, None] * mask
    uids = np.repeat([f"g{number}" for number in range(GROUPS)], MEMBERS).astype(object)
    return DataProto.from_dict(
        tensors={
            "response_mask": mask,
            "token_level_rewards": rewards,
            "advantages": spread,
            "returns": spread.clone(),
            "values": torch.zeros(ROWS, WIDTH),
        },
        non_tensors={"uid": uids},
    )


def found(batch: DataProto, name: str) -> list[str]:
    return [finding.text for finding in advantage_faults(batch, EpisodeRows(batch), name)]


def scores() -> np.ndarray:
    return np.random.default_rng(0).normal(size=ROWS)


@pytest.fixture
def told(registries_as_they_were: None) -> Any:
    """Registers estimators that say different things of themselves."""

    def mine(token_level_rewards: Any, response_mask: Any, index: Any) -> Any:
        raise NotImplementedError

    def other(token_level_rewards: Any, response_mask: Any, index: Any) -> Any:
        raise NotImplementedError

    register_adv_est("says_nothing")(mine)
    register_adv_est("no_order", ordered=False)(other)


@pytest.mark.parametrize("make", [np.sign, np.tanh, lambda x: x**3, lambda x: 5 * x - 2])
def test_any_formula_that_keeps_the_order_is_silent(make: Any) -> None:
    own = scores()
    assert found(batch_of(own, make(own)), "grpo") == []


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "maxrl"])
def test_an_order_that_is_turned_round_rings(name: str) -> None:
    own = scores()
    (text,) = found(batch_of(own, -own), name)
    assert "24 of 24 pairs within groups" in text


def test_a_few_pairs_of_another_order_ring_where_it_is_kept(told: Any) -> None:
    own = scores()
    advantages = own.copy()
    advantages[:4] *= -1
    batch = batch_of(own, advantages)
    assert len(found(batch, "grpo")) == 1
    assert found(batch, "says_nothing") == found(batch, "no_order") == []


def test_nearly_all_pairs_ring_where_nothing_is_said_of_order(told: Any) -> None:
    own = scores()
    assert len(found(batch_of(own, -own), "says_nothing")) == 1
    assert found(batch_of(own, -own), "no_order") == []


def test_equal_scores_have_nothing_to_compare() -> None:
    own = scores()
    own[4:8] = 1.0
    advantages = own.copy()
    advantages[4:8] = 0.0
    assert found(batch_of(own, advantages), "grpo") == []
    advantages[5] = 0.5
    (text,) = found(batch_of(own, advantages), "grpo")
    assert "all episodes of group g1 have the score 1" in text
    # Whitening over the batch moves them all.
    assert found(batch_of(own, advantages - 0.3), "reinforce_plus_plus_baseline") == []


@pytest.mark.parametrize("name", ["grpo", "gae", "says_nothing"])
def test_what_was_not_sampled_has_no_advantage(name: str, told: Any) -> None:
    own = scores()
    batch = batch_of(own, own)
    batch.batch["advantages"][2, -1] = 0.1
    (text,) = found(batch, name)
    assert text == "1 of them stand on tokens that were not sampled"


def test_a_number_that_is_not_finite_rings() -> None:
    own = scores()
    batch = batch_of(own, own)
    batch.batch["advantages"][0, 0] = float("nan")
    assert "one is not a finite number" in found(batch, "on_policy_distillation")


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "turn_gae"])
def test_advantages_that_go_against_their_returns_ring(name: str) -> None:
    own = scores()
    batch = batch_of(own, own)
    batch.batch["returns"] = 3 * batch.batch["advantages"] + 0.2
    assert found(batch, name) == []
    batch.batch["returns"] = -batch.batch["returns"]
    (text,) = found(batch, name)
    assert "they fall where returns less values rise (correlation -" in text


def test_of_an_estimator_that_is_not_known_nothing_is_said() -> None:
    own = scores()
    assert found(batch_of(own, -own), "nobody") == []
    assert EstimatorFacts().ordered is None
