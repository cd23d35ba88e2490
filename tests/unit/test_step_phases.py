"""Tests what a step's phases make of rewards, above all of episodes of several rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data.array_ops import object_array
from data.protocol import DataProto
from training import greedy_baselines, step_phases
from training.greedy_baselines import rewards_by_group
from training.ray_trainer import PPOTrainer
from training.run.abort_policy import EnvironmentsFail, PartsOfBatch, UnscoredWatch
from training.step_phases import StepPhases


def rows_of(episodes: list[tuple[str, int, list[int]]]) -> DataProto:
    """Makes rows of two places; each is (episode, number of the row, turns of its tokens)."""
    turns = torch.tensor([turns for _, _, turns in episodes])
    return DataProto.from_dict(
        tensors={
            "response_mask": (turns >= 0).long(),
            "turn_ids": turns,
            "responses": torch.arange(len(episodes))[:, None].expand(-1, 2).clone(),
        },
        non_tensors={
            "uid": object_array(["g"] * len(episodes)),
            "episode_id": object_array([name for name, _, _ in episodes]),
            "episode_row": np.array([number for _, number, _ in episodes]),
        },
    )


def phases_of(
    *, plays_rows: bool = True, beside: bool = False, reward_fn: Any = None
) -> StepPhases:
    """Makes phases that have what scores need, and no model."""
    phases = StepPhases.__new__(StepPhases)
    config: Any = SimpleNamespace(
        plays_dataset_rows=plays_rows,
        environments=(1,),
        agent=SimpleNamespace(on_failure="mask"),
        reward_model=SimpleNamespace(launch_reward_fn_async=beside),
        algorithm=SimpleNamespace(rollout_correction=SimpleNamespace(corrects=False)),
    )
    phases.config = config
    phases.groups = SimpleNamespace(reward_model=None)  # type: ignore[assignment]
    phases.reward_fn = reward_fn
    phases.unscored = UnscoredWatch(0.5)
    return phases


class Scorer:
    """Scores each row with 1, and says so; remembers which rows it saw."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, data: DataProto, return_dict: bool = False) -> dict[str, Any]:
        rows = data.batch["responses"][:, 0].tolist()
        self.seen += rows
        return {
            "reward_tensor": torch.ones(len(rows)),
            "reward_extra_info": {"row": rows, "unscored": [row == 0 for row in rows]},
        }


# The first episode goes on in row 0 after its helper's row 1; the second ends in its later row.
TWO_EPISODES = [("a", 0, [0, 2]), ("a", 1, [1, -1]), ("b", 0, [0, -1]), ("b", 1, [1, 1])]


@pytest.mark.parametrize("beside", [False, True])
def test_a_reward_function_sees_the_row_of_an_episodes_last_turn_alone(beside: bool) -> None:
    scorer = Scorer()
    phases = phases_of(beside=beside, reward_fn=scorer)
    scores, infos = phases.start_reward(rows_of(TWO_EPISODES))()
    assert scorer.seen == [0, 3]
    assert scores.tolist() == [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    assert infos["row"] == [0, None, None, 3]


def test_an_environments_rows_are_all_paid() -> None:
    scorer = Scorer()
    scores, _ = phases_of(plays_rows=False).score(rows_of(TWO_EPISODES), scorer)
    assert scorer.seen == [0, 1, 2, 3]
    assert scores.sum(1).tolist() == [1.0] * 4


def test_a_judge_that_fails_on_an_earlier_row_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The judge of row 0 fails: that row counts in the first episode, and not in the second."""
    monkeypatch.setattr(step_phases, "side_names", lambda config: ("judge",))
    for first_turns, left in (([0, 2], False), ([0, 0], True)):
        batch = rows_of([("a", 0, first_turns), ("a", 1, [1, -1]), ("b", 0, [0, 0])])
        phases = phases_of()
        scores, infos = phases.score(batch, Scorer())
        batch = phases.add_rewards(batch, scores, infos)
        assert batch.batch["response_mask"][0].any() == left
        assert batch.batch["response_mask"][2].any()


@pytest.mark.parametrize(
    ("rollout_is", "bypasses", "needed"),
    [("sequence", False, True), ("token", False, False), ("sequence", True, False)],
)
def test_weights_of_sequences_are_made_before_the_update_where_an_episode_has_several_rows(
    rollout_is: str, bypasses: bool, needed: bool
) -> None:
    phases = phases_of()
    correction: Any = SimpleNamespace(rollout_is=rollout_is, bypass_mode=bypasses)
    phases.config.algorithm.rollout_correction = correction  # type: ignore[misc]
    assert phases.weighs_several_rows(rows_of(TWO_EPISODES)) == needed
    alone = rows_of([("a", 0, [0, 2]), ("b", 0, [0, -1])])
    assert not phases.weighs_several_rows(alone), "a row's own update has all that it needs"


@pytest.mark.parametrize("filters", [False, True])
def test_a_judge_that_fails_too_often_ends_a_run_whether_groups_are_filtered_or_not(
    monkeypatch: pytest.MonkeyPatch, filters: bool
) -> None:
    """In each step 3 of 5 episodes have no score, and a dummy row pads the batch."""
    monkeypatch.setattr(step_phases, "side_names", lambda config: ("judge",))
    phases = phases_of()
    steps = 0
    with pytest.raises(EnvironmentsFail, match="9 of 15 answers"):
        for _ in range(12):
            batch = rows_of([(str(number), 0, [0, -1]) for number in range(5)])
            batch = batch.pad_with_dummies(6)
            steps += 1
            unscored = [True] * 3 + [False] * 2 + [None]
            batch = phases.add_rewards(batch, torch.zeros(6, 2), {"unscored": unscored})
            if filters:
                scores, infos = phases.start_reward(batch)()
                phases.add_rewards(batch, scores, infos)
    assert steps == 3


def test_episodes_are_counted_where_all_were_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of an episode are one answer, and a dummy is none."""
    monkeypatch.setattr(step_phases, "side_names", lambda config: ("judge",))
    counted: list[tuple[int, int]] = []
    phases = phases_of()
    phases.unscored = SimpleNamespace(  # type: ignore[assignment]
        count=lambda *, tried, failed: counted.append((tried, failed))
    )
    batch = rows_of(TWO_EPISODES).pad_with_dummies(6)
    phases.add_rewards(batch, torch.zeros(len(batch), 2), {})
    assert counted == [(2, 0)]


def test_a_batch_that_is_scored_in_parts_is_counted_whole() -> None:
    """Three parts of one episode fail in a row, of ten; three such batches are below the limit."""
    parts = PartsOfBatch(UnscoredWatch(0.5))
    for _ in range(4):
        for number in range(10):
            parts.count(tried=1, failed=int(number < 3))
        parts.end_batch()
    with pytest.raises(EnvironmentsFail, match="16 of 30 answers"):
        for failed in (3, 10):
            parts.count(tried=10, failed=failed)
            parts.end_batch()


def test_a_greedy_baseline_is_the_mean_of_an_agents_conversations() -> None:
    batch = rows_of([("a", 0, [0, -1]), ("a", 1, [1, -1]), ("b", 0, [0, -1])])
    batch.non_tensor_batch["uid"] = object_array(["g", "g", "h"])
    batch.non_tensor_batch["agent_role"] = object_array(["p/solver"] * 3)
    batch.non_tensor_batch["agent_conversation"] = object_array(["s/0", "s/1", "s/0"])
    scores = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.25, 0.0]])
    trainer: Any = SimpleNamespace(
        play=lambda prompts: batch, score=lambda batch, function: (scores, {}), reward_fn=None
    )
    rewards = rewards_by_group(trainer, batch)
    assert rewards == {"g p/solver": 0.5, "h p/solver": 0.25}


def test_a_role_that_the_greedy_episode_lacks_has_no_baseline_and_is_masked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = rows_of([("a", 0, [0, 0]), ("a", 1, [1, 1])])
    batch.non_tensor_batch["uid"] = object_array(["g", "g"])
    batch.non_tensor_batch["agent_role"] = object_array(["p/solver", "p/critic"])
    batch.batch["response_mask"] = torch.ones(2, 2, dtype=torch.int64)
    config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(n=2)),
        estimator_needs=("reward_baselines",),
        agent=SimpleNamespace(on_failure="refill"),
    )
    trainer: Any = SimpleNamespace(
        config=config,
        prompt_batch=lambda *args, **kwargs: SimpleNamespace(meta_info={}),
        play=lambda prompts: batch,
    )
    monkeypatch.setattr(
        greedy_baselines, "rewards_by_group", lambda trainer, prompts: {"g p/solver": 0.5}
    )
    answered = PPOTrainer._answers(trainer, {}, 0, None)
    assert answered.batch["reward_baselines"].tolist() == [0.5, 0.0]
    assert answered.batch["response_mask"].tolist() == [[1, 1], [0, 0]]
