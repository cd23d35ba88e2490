"""Environments that ignore their seeds, and episodes that nobody asked to leave out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from custom.reward_managers.unscored import UNSCORED
from data.protocol import DataProto
from features.alarms.finding import Finding
from features.alarms.rules.batch import masked_episodes
from features.alarms.rules.seeds import SeedRules
from tests.features.alarms.made_steps import changed, made_run, seen_step
from training.batch.episode_rows import REWARD_INFO
from training.config import PPOConfig

GROUPS, MEMBERS, WORDS = 16, 8, 5
# What an environment answers to a word, by its group's seed and the draw of an episode's own.
World = Callable[[int, int, float], int]


def by_seed(word: int, seed: int, own: float) -> int:
    """Higher, or lower, as the seed's number says."""
    return 20 + (word < seed % WORDS)


def by_itself(word: int, seed: int, own: float) -> int:
    return by_seed(word, int(1000 * own), own)


def one_task(word: int, seed: int, own: float) -> int:
    return by_seed(word, 2, own)


def slightly_noisy(word: int, seed: int, own: float) -> int:
    return 30 if own < 0.01 else by_seed(word, seed, own)


def played(world: World, step: int) -> DataProto:
    """Episodes of two turns: a word, what came of it, and another word."""
    draw = np.random.default_rng(step)
    rows = []
    facts = []
    for group in range(GROUPS):
        seed = 100 * step + 7 * group + group // 3
        for _ in range(MEMBERS):
            word = int(draw.integers(WORDS))
            rows.append([word, world(word, seed, draw.random()), int(draw.integers(WORDS)), 19])
            facts.append({"ending": "done", "turns": 2, "info": {}, "sampled_tokens": 2})
    size = GROUPS * MEMBERS
    turn_ids = torch.tensor([0, -1, 1, -1]).expand(size, 4)
    uids = [f"{step}.{row // MEMBERS}" for row in range(size)]
    return DataProto.from_dict(
        tensors={
            "prompts": torch.ones(size, 2, dtype=torch.int64),
            "responses": torch.tensor(rows),
            "response_mask": (turn_ids >= 0).to(torch.int64),
            "turn_ids": turn_ids,
            "environment_rewards": torch.zeros(size, 4),
        },
        non_tensors={
            "uid": np.array(uids, dtype=object),
            "episode_id": np.array([f"{step}.{row}" for row in range(size)], dtype=object),
            "env_seed": np.arange(size) // MEMBERS,
            "episode_facts": np.array(facts, dtype=object),
        },
    )


def findings(worlds: list[World], config: PPOConfig | None = None) -> list[list[Finding]]:
    rules = SeedRules(made_run(config))
    return [
        list(rules.ignored_seeds(seen_step(played(world, step), config=config)))
        for step, world in enumerate(worlds)
    ]


@pytest.mark.parametrize("world", [by_seed, one_task, slightly_noisy])
def test_an_environment_that_does_as_its_seed_says_is_silent(world: World) -> None:
    """One whose every task is the same, too, and one with a little noise of its own."""
    assert not any(findings([world] * 20))


@pytest.mark.parametrize("earlier", [by_seed, by_itself])
def test_a_reset_that_draws_for_itself_is_named_within_two_steps(earlier: World) -> None:
    found = findings([earlier] + [by_itself] * 2)
    assert "had another outcome than that of another member" in found[-1][0].text


def test_members_may_differ_where_the_config_says_so() -> None:
    config = changed(PPOConfig(), "agent.allow_different_tasks", True)
    assert not any(findings([by_itself] * 4, config))


def test_a_reset_that_has_come_to_give_one_task_is_named_within_two_steps() -> None:
    found = findings([by_seed] + [one_task] * 2)
    assert "all groups face one task" in found[-1][0].text


def masked(rows: list[int], **columns: list[object]) -> list[Finding]:
    batch = played(by_seed, 1)
    batch.batch["response_mask"] = batch.batch["response_mask"].clone()
    batch.batch["response_mask"][rows] = 0
    for name, values in columns.items():
        batch.non_tensor_batch[REWARD_INFO + name] = np.array(values, dtype=object)
    return list(masked_episodes(seen_step(batch)))


def test_episodes_that_nobody_asked_to_mask_are_counted() -> None:
    assert not masked([])
    (found,) = masked([3, 5])
    assert found.text.startswith("nothing of 2 of 128 episodes is trained on")
    assert "first episode 1.3" in found.text and found.place.episode == "1.3"


def test_episodes_without_a_score_are_masked_for_a_reason() -> None:
    unscored = [row in (3, 5) for row in range(GROUPS * MEMBERS)]
    assert not masked([3, 5], **{UNSCORED: unscored})
    assert len(masked([3, 6], **{UNSCORED: unscored})) == 1


def test_episodes_that_failed_have_no_turn_left() -> None:
    batch = played(by_seed, 1)
    for name, nothing in (("response_mask", 0), ("turn_ids", -1)):
        batch.batch[name] = batch.batch[name].clone()
        batch.batch[name][:4] = nothing
    assert not list(masked_episodes(seen_step(batch)))


def test_a_correction_may_leave_episodes_out() -> None:
    config = changed(PPOConfig(), "algorithm.rollout_correction.rollout_rs", "sequence")
    batch = played(by_seed, 1)
    batch.batch["response_mask"] = torch.zeros_like(batch.batch["response_mask"])
    assert config.algorithm.rollout_correction.corrects
    assert not list(masked_episodes(seen_step(batch, config=config)))
