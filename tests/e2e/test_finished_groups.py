"""Training on groups of episodes that have ended while others play.

It gives the numbers of training on all at once.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data.protocol import DataProto
from tests.e2e.test_agents import GRPO, fit, game_config
from tests.e2e.test_resume import tensors
from tests.e2e.test_training import read_steps
from training.async_rollout.group_streaming import GroupStreamingPhases
from training.config import PPOConfig
from training.config.loader import ConfigError, load_config

SLOW = """
import random, time
from custom.env import BaseEnvironment

class Slow(BaseEnvironment):
    \"\"\"Sleeps differently at each run.\"\"\"

    def reset(self, seed):
        self.turns = 0
        return f"Say {seed % 7}."

    def step(self, action):
        self.turns += 1
        time.sleep(random.Random(time.time_ns()).random() / 4)
        return "Again.", float(len(action) % 5), self.turns >= 2, {}
"""
WHOLE = (
    *GRPO,
    "actor_rollout_ref.actor.ppo_mini_batch_size=null",
    "trainer.launcher=local",
    "trainer.save_freq=2",
)


def train(task: Path, folder: Path, *overrides: str) -> tuple[Any, list[dict[str, Any]]]:
    folder.mkdir()
    (folder / "slow.py").write_text(SLOW)
    own = (
        f"agent.environment.path={folder}/slow.py",
        "agent.environment.cls=Slow",
        "agent.environment.kwargs={}",
    )
    fit(game_config(task, folder / "run", *WHOLE, *own, *overrides))
    return tensors(folder / "run/global_step_2/actor/model"), read_steps(folder / "run")


def test_groups_are_learnt_of_as_they_end_with_the_numbers_of_all_at_once(
    tiny_game: Path, tmp_path: Path
) -> None:
    _, expected = train(tiny_game, tmp_path / "whole")
    _, steps = train(tiny_game, tmp_path / "parts", "trainer.train_finished_groups=true")
    assert max(step["training/parts_of_update"] for step in steps) > 1
    for step, other in zip(steps, expected, strict=True):
        for name in (
            "actor/grad_norm",
            "actor/pg_loss",
            "actor/entropy",
            "critic/score/mean",
            "response_length/mean",
        ):
            assert step[name] == pytest.approx(
                other[name], rel=1e-5 if step["step"] == 1 else 1e-3, abs=1e-6
            ), name


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["trainer.n_gpus_per_node=2", "trainer.rollout_n_gpus=1"])
def test_several_ranks_and_engines_of_their_own_do_so_too(
    tiny_game: Path, tmp_path: Path, ranks: str
) -> None:
    own = (
        "trainer.launcher=ray",
        ranks,
        "actor_rollout_ref.rollout.name=hf",
        "agent.agent_length=6",
    )
    _, expected = train(tiny_game, tmp_path / "whole", *own)
    _, steps = train(tiny_game, tmp_path / "parts", *own, "trainer.train_finished_groups=true")
    assert max(step["training/parts_of_update"] for step in steps) > 1
    for name in (
        "actor/grad_norm",
        "actor/pg_loss",
        "actor/entropy",
        "critic/score/mean",
        "response_length/mean",
    ):
        assert steps[0][name] == pytest.approx(expected[0][name], rel=1e-4, abs=1e-6), name


@pytest.mark.long
def test_in_a_deterministic_run_it_changes_nothing_bitwise(tiny_game: Path, tmp_path: Path) -> None:
    fixed = ("trainer.deterministic=true",)
    whole, _ = train(tiny_game, tmp_path / "whole", *fixed)
    parts, _ = train(tiny_game, tmp_path / "parts", *fixed, "trainer.train_finished_groups=true")
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_what_the_reward_function_says_of_some_groups_alone_is_none_of_the_others() -> None:
    worker = SimpleNamespace(finish_update=lambda: {"actor/grad_norm": 1.0})
    groups: Any = SimpleNamespace(policy=worker)
    phases = GroupStreamingPhases(PPOConfig(), groups, lambda batch: batch)
    for names in (["uid", "reward_info/hit"], ["uid"], ["uid", "reward_info/form"]):
        columns = {name: np.array([name, name], dtype=object) for name in names}
        phases.trained_parts.append(
            DataProto.from_dict(tensors={"x": torch.zeros(2)}, non_tensors=columns)
        )
    batch = phases.arrange(DataProto())
    metrics = phases.update_actor(batch)
    assert metrics == {"training/parts_of_update": 3.0, "actor/grad_norm": 1.0} and len(batch) == 6
    hit = "reward_info/hit"
    assert batch.non_tensor_batch[hit].tolist() == [hit, hit, None, None, None, None]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("algorithm.adv_estimator=gae", "algorithm.adv_estimator=gae cannot"),
        ("actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.actor.ppo_epochs=2"),
        ("algorithm.use_kl_in_reward=true", "algorithm.use_kl_in_reward=True"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=sapo", "policy_loss.loss_mode=sapo"),
    ],
)
def test_what_looks_beyond_a_group_is_refused(
    tiny_game: Path, tmp_path: Path, override: str, named: str
) -> None:
    argv = [
        "configs/quickstart.yaml",
        f"actor_rollout_ref.model.path={tiny_game}/model",
        *WHOLE,
        override,
    ]
    with pytest.raises(ConfigError) as refused:
        load_config([*argv, "trainer.train_finished_groups=true"])
    (problem,) = [line for line in refused.value.problems if "group by group" in line]
    assert named in problem
