"""Copies among a group's answers, memory that creeps, and rewards that are rare."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from data.protocol import DataProto
from features.alarms.rules.groups import equal_answers, nats_of_count
from features.alarms.rules.machine import SLOPE_STEPS, MemoryRules, steady_slope
from features.alarms.rules.rewards import SourceRewards
from tests.features.alarms.made_steps import made_run, seen_step

MIB = 1 / 1024
TURNS, WORDS = 4, 6


def played(seeds: list[int], groups: int = 8) -> DataProto:
    """Groups of episodes of TURNS turns of one of WORDS words, the world's token between them.

    Members of one seed say the same throughout.
    """
    draw = np.random.default_rng(0)
    rows = []
    uids = []
    for group in range(groups):
        said = {seed: draw.integers(WORDS, size=TURNS) for seed in sorted(set(seeds))}
        for seed in seeds:
            rows.append(np.stack([said[seed], np.full(TURNS, 9)], axis=1).reshape(-1))
            uids.append(f"group {group}")
    responses = torch.from_numpy(np.array(rows))
    sampled = torch.tensor([1, 0]).repeat(TURNS).expand_as(responses)
    turns = torch.arange(TURNS).repeat_interleave(2).expand_as(responses)
    return DataProto.from_dict(
        tensors={
            "prompts": torch.ones(len(rows), 2, dtype=torch.int64),
            "responses": responses,
            "response_mask": sampled,
            "turn_ids": torch.where(sampled.bool(), turns, -1),
            "rollout_log_probs": sampled * -math.log(WORDS),
        },
        non_tensors={"uid": np.array(uids, dtype=object)},
    )


@pytest.mark.parametrize("seeds", [[0, 0, 1, 1], [0, 1, 1, 2], [0, 1, 2, 2], [0, 0, 0, 0]])
def test_copies_of_any_member_are_found_in_one_step(seeds: list[int]) -> None:
    (found,) = equal_answers(seen_step(played(seeds)))
    assert "answers equal one that another member of their group gave there" in found.text


@pytest.mark.parametrize("members", [2, 4, 16])
def test_members_that_agree_by_chance_are_no_copies(members: int) -> None:
    assert not list(equal_answers(seen_step(played(list(range(members)), groups=32))))


def test_a_word_that_is_nearly_certain_may_come_from_all() -> None:
    batch = played([0, 0, 1, 1])
    batch.batch["rollout_log_probs"] = batch.batch["response_mask"] * -0.001
    assert not list(equal_answers(seen_step(batch)))


def test_equal_answers_to_other_observations_are_not_compared() -> None:
    """What a second turn says is compared where both were told the same."""
    batch = played([0, 0, 1, 1])
    # The first answer is certain, and the world then says something else to each.
    batch.batch["responses"][:, 0] = 0
    batch.batch["rollout_log_probs"][:, 0] = 0.0
    batch.batch["responses"][:, 1] = torch.arange(len(batch)) + 10
    assert not list(equal_answers(seen_step(batch)))


def sizes(growth: object) -> list[float]:
    """The memory of steps, GiB, with a jitter of 2 MiB."""
    jitter = np.random.default_rng(1).normal(0, 2 * MIB, SLOPE_STEPS)
    return [0.7 + growth(step) + jitter[step] for step in range(SLOPE_STEPS)]  # type: ignore[operator]


def test_a_tenth_of_a_mib_a_step_rings_within_300_steps() -> None:
    rules = MemoryRules(made_run())
    found = []
    for size in sizes(lambda step: 0.12 * MIB * step):
        found += rules.creeping_memory(seen_step(metrics={"perf/driver_memory_gib": size}))
    assert SLOPE_STEPS < 300
    (finding,) = found
    assert finding.alarm == "memory_grows"
    assert "perf/driver_memory_gib grows all the time, by 0.1" in finding.text


@pytest.mark.parametrize(
    "growth",
    [
        lambda step: 0.0,
        lambda step: 100 * MIB * (1 - math.exp(-step / 50)),
        lambda step: 60 * MIB * math.log1p(step) / math.log(SLOPE_STEPS),
        lambda step: 200 * MIB * (step > 100),
        lambda step: 20 * MIB * math.sin(step / 15),
    ],
)
def test_memory_that_fills_up_jumps_or_swings_does_not_creep(growth: object) -> None:
    assert steady_slope(sizes(growth)) is None


def steps_until_it_rings(rate: float, *, size: int, seed: int, steps: int) -> int | None:
    """Steps of rewards at a rate from 0 to 1, after one that had some; None: none of them rings."""
    draw = np.random.default_rng(seed)
    source = SourceRewards()
    source.add([1.0] + [0.0] * (size - 1))
    for step in range(steps):
        rewards = (draw.random(size) < rate).astype(float).tolist()
        source.add(rewards)
        if source.is_suspicious(rewards[0]):
            return step
    return None


@pytest.mark.seconds
def test_rewards_of_one_in_a_thousand_stay_away_without_an_alarm() -> None:
    rang = [
        steps_until_it_rings(0.001, size=128, seed=seed, steps=200) is not None
        for seed in range(20)
    ]
    assert sum(rang) == 0


def test_rewards_of_one_in_four_that_end_are_missed_after_some_steps() -> None:
    source = SourceRewards()
    source.add(([1.0] + [0.0] * 3) * 32)
    source.add([0.0] * 128)
    assert source.is_suspicious(0.0)


def test_the_bound_on_a_count_holds_in_simulation() -> None:
    """Chance passes a bound of b nats at most exp(-b) of the time."""
    draw = np.random.default_rng(0)
    chances = draw.random(60) ** 2
    counts = (draw.random((4000, 60)) < chances).sum(1)
    nats = np.array([nats_of_count(int(count), chances) for count in counts])
    for bound in (1.0, 2.0, 3.0):
        assert (nats > bound).mean() <= math.exp(-bound)
    assert nats_of_count(60, chances) > 23
