"""Whole runs with the sampler: rows, seeds, levels; filtered groups, failures, kills, the page."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from data.learning_sampler import OUTCOMES, TASK_INDEX, GroupOutcome
from data.protocol import DataProto
from features.difficulty.sampler import DifficultySampler
from main import run
from tests.conftest import PROJECT
from tests.e2e.agent_games import fate
from tests.e2e.test_agents import GRPO, fit, game_config, playing, playing_in_turn
from tests.e2e.test_resume import finish, run_and_kill, tensors
from tests.e2e.test_training import read_steps, tiny_config
from training.run.checkpoint_contents import load_driver_state
from training.run.exit_codes import MEND
from training.run.signals import EndingSignals

SAMPLER = ("data.sampler.name=difficulty", "difficulty.explore=0.25")
SEEDS = (*SAMPLER, "difficulty.seeds=20")
FILTER = (
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.max_num_gen_batches=10",
)
MIXED = (
    f"agent.environment.path={PROJECT}/tests/features/difficulty/games.py",
    "agent.environment.cls=Mixed",
)


def told_of(trainer: Any) -> list[list[GroupOutcome]]:
    """Has the trainer's sampler keep what it is told of each step; returns the list."""
    told: list[list[GroupOutcome]] = []
    order = trainer.row_stream.order
    learn = order.inner.update

    def update(batch: DataProto) -> None:
        told.append(batch.meta_info[OUTCOMES])
        learn(batch)

    order.inner.update = update
    return told


def sampler_of(trainer: Any) -> DifficultySampler:
    sampler = trainer.row_stream.order.inner
    assert isinstance(sampler, DifficultySampler)
    return sampler


def columns(batch: DataProto, name: str) -> list[Any]:
    """A column's value of each group, in the order of the groups' names."""
    real = batch.drop_dummies()
    of_group = dict(zip(real.non_tensor_batch["uid"], real.non_tensor_batch[name], strict=True))
    return [of_group[uid] for uid in sorted(of_group)]


def test_rows_of_prompts_are_tasks_and_validation_is_none(tiny_task: Path, tmp_path: Path) -> None:
    words = (*GRPO, *SAMPLER, "trainer.total_training_steps=3", "trainer.test_freq=1")
    told: list[list[GroupOutcome]] = []
    trainer, batches = fit(
        tiny_config(tiny_task, tmp_path, *words, "trainer.val_before_train=true"),
        lambda trainer: told.append(told_of(trainer)),  # type: ignore[arg-type]
    )
    truths = [
        row["reward_model"]["ground_truth"]
        for row in pq.read_table(tiny_task / "train.parquet").to_pylist()
    ]
    for batch in batches:
        tasks = columns(batch, TASK_INDEX)
        assert [truths[task] for task in tasks] == [
            each["ground_truth"] for each in columns(batch, "reward_model")
        ]
    sampler = sampler_of(trainer)
    assert sampler.memory.groups.sum() == 3 * 8, "the groups of training, and no others"
    assert "validate" not in {outcome.task for step in told[0] for outcome in step}
    # By hand: the rewards of each group of the last step.
    real = batches[-1].drop_dummies()
    rewards: dict[int, list[float]] = {}
    for task, scores in zip(
        real.non_tensor_batch[TASK_INDEX], real.batch["token_level_scores"], strict=True
    ):
        rewards.setdefault(int(task), []).append(float(scores.sum()))
    last = {outcome.task: outcome.rewards for outcome in told[0][-1]}
    assert last.keys() == rewards.keys()
    for task, values in rewards.items():
        assert last[task] == pytest.approx(sorted(values))
    steps = read_steps(tmp_path)[1:]
    pools = ("new", "hard", "apt", "easy", "failing")
    assert all(sum(step[f"difficulty/pool/{name}"] for name in pools) == 64 for step in steps)
    assert steps[0]["difficulty/pool/new"] == 56


def test_environment_seeds_are_tasks(tiny_game: Path, tmp_path: Path) -> None:
    words = (*GRPO, *SEEDS, "trainer.total_training_steps=4", "agent.val_length=4")
    trainer, batches = fit(game_config(tiny_game, tmp_path, *words, "trainer.test_freq=1"))
    for batch in batches:
        assert columns(batch, "env_seed") == columns(batch, TASK_INDEX)
    memory = sampler_of(trainer).memory
    assert memory.groups.sum() == 32 and (memory.groups > 0).all()
    tokens = sum(
        int(facts["sampled_tokens"])
        for batch in batches
        for facts in batch.drop_dummies().non_tensor_batch["episode_facts"]
        if facts is not None
    )
    assert memory.tokens.sum() == tokens


def test_levels_are_tasks_and_may_come_more_than_once_a_step(
    tiny_game: Path, tmp_path: Path
) -> None:
    words = (*GRPO, *SAMPLER, *playing_in_turn("Even", "Equal"))
    trainer, batches = fit(
        game_config(tiny_game, tmp_path, *words, "trainer.total_training_steps=3")
    )
    for batch in batches:
        assert columns(batch, "agent_index") == columns(batch, TASK_INDEX)
        seeds = columns(batch, "env_seed")
        assert len(set(seeds)) == len(seeds) == 8, "a level has a fresh seed in each group"
    memory = sampler_of(trainer).memory
    assert memory.spreads()[1] == 0 and memory.spreads()[0] > 0
    # `Equal` pays the same to all, so that only exploration goes on with it.
    assert sum(columns(batches[-1], TASK_INDEX)) <= 2


def test_groups_that_dynamic_sampling_leaves_out_are_told_of(
    tiny_game: Path, tmp_path: Path
) -> None:
    words = (*GRPO, *SEEDS, *FILTER, *MIXED, "trainer.total_training_steps=3")
    kept: list[list[list[GroupOutcome]]] = []
    trainer, batches = fit(
        game_config(tiny_game, tmp_path, *words), lambda trainer: kept.append(told_of(trainer))
    )
    [told] = kept
    steps = read_steps(tmp_path)
    for step, outcomes, batch in zip(steps, told, batches, strict=True):
        assert len(outcomes) == 8 * step["filter_groups/batches"]
        trained = [outcome for outcome in outcomes if outcome.has_spread]
        assert sum(not outcome.has_spread for outcome in outcomes) == step["filter_groups/dropped"]
        assert set(columns(batch, TASK_INDEX)) <= {outcome.task for outcome in trained}
        spent = sum(outcome.tokens for outcome in outcomes)
        flat = sum(outcome.tokens for outcome in outcomes if not outcome.has_spread)
        assert step["difficulty/tokens_without_spread"] == pytest.approx(flat / spent)
    assert sum(step["filter_groups/batches"] for step in steps) > 3, "or nothing is tested"
    assert sampler_of(trainer).memory.groups.sum() == sum(map(len, told))
    assert OUTCOMES not in batches[0].meta_info


def test_episodes_that_fail_are_counted_apart(tiny_game: Path, tmp_path: Path) -> None:
    words = (*GRPO, *SEEDS, *playing("DoomedTasks"), "agent.on_failure=zero")
    words += ("agent.max_failure_rate=1", "trainer.total_training_steps=4")
    trainer, _ = fit(game_config(tiny_game, tmp_path, *words))
    memory = sampler_of(trainer).memory
    doomed = [seed for seed in range(20) if fate(seed) != "fine" and memory.groups[seed]]
    for seed in range(20):
        failed = memory.failed[seed]
        if seed in doomed:
            assert failed == 4 * memory.groups[seed] and memory.visits[seed] == 0
        else:
            assert failed == 0 and memory.visits[seed] == memory.groups[seed]
    assert read_steps(tmp_path)[-1]["difficulty/pool/failing"] == len(doomed) > 3


def argv_of(game: Path, run_dir: Path, *words: str) -> list[str]:
    return [
        str(PROJECT / "configs/quickstart.yaml"),
        f"actor_rollout_ref.model.path={game}/model",
        *MIXED,
        f"trainer.default_local_dir={run_dir}",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "agent.val_length=8",
        "trainer.total_training_steps=4",
        "trainer.save_freq=1",
        "trainer.test_freq=2",
        "trainer.max_actor_ckpt_to_keep=2",
        "trainer.deterministic=true",
        "trainer.logger=[file]",
        *GRPO,
        *SEEDS,
        *words,
    ]


def numbers_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step, those of time apart."""
    times = ("timing", "perf/", "alarms/")
    return [
        {
            name: value
            for name, value in step.items()
            if not name.startswith(times) and "seconds" not in name
        }
        for step in read_steps(folder)
    ]


def assert_same_end(one: Path, other: Path, step: int = 4) -> None:
    """Compares weights, the sampler's state and all metrics of two runs."""
    weights = [tensors(folder / f"global_step_{step}/actor/model") for folder in (one, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    states = [load_driver_state(folder / f"global_step_{step}").sampler for folder in (one, other)]
    assert states[0].keys() == states[1].keys() and states[0]["memory"]
    for name, tensor in states[0]["memory"].items():
        assert torch.equal(tensor, states[1]["memory"][name]), name
    assert numbers_of(one) == numbers_of(other)


@pytest.mark.parametrize("words", [(), FILTER], ids=["plain", "filtered"])
def test_a_killed_run_ends_bitwise_like_one_that_was_not(
    tiny_game: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    main = [sys.executable, str(PROJECT / "main.py")]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish([*main, *argv_of(tiny_game, whole, *words)])
    argv = [*main, *argv_of(tiny_game, broken, *words)]
    run_and_kill(argv, broken, random.Random(5))
    finish(argv)
    assert_same_end(whole, broken)


def test_a_run_ahead_that_was_cut_off_ends_bitwise_as_one_that_was_not(
    cluster: None, tiny_game: Path, tmp_path: Path
) -> None:
    own = (
        *GRPO,
        *SEEDS,
        *MIXED,
        "actor_rollout_ref.rollout.name=hf",
        "trainer.rollout_n_gpus=1",
        "trainer.async_level=1",
        "trainer.deterministic=true",
        "trainer.save_freq=2",
        "trainer.total_training_steps=5",
    )
    _, whole = fit(game_config(tiny_game, tmp_path / "whole", *own))

    def cut(trainer: Any) -> None:
        def stop(told: dict[str, float]) -> None:
            if told["training/global_step"] == 3:
                trainer.saver.poll(wait=True)
                raise RuntimeError("cut off")

        trainer.on_step = stop

    with pytest.raises(RuntimeError, match="cut off"):
        fit(game_config(tiny_game, tmp_path / "cut", *own), cut)
    _, resumed = fit(game_config(tiny_game, tmp_path / "cut", *own))
    drawn = [columns(batch, TASK_INDEX) for batch in whole]
    assert [columns(batch, TASK_INDEX) for batch in resumed] == drawn[2:]
    assert not set(drawn[0]) & set(drawn[1]), "drawn before the first step was told of"
    assert_same_end(tmp_path / "whole", tmp_path / "cut", step=5)


@pytest.mark.parametrize("words", [(), FILTER], ids=["plain", "filtered"])
def test_steps_are_drawn_ahead_in_a_run_that_waits_for_nothing(
    cluster: None, tiny_game: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    own = (
        *GRPO,
        *SEEDS,
        *MIXED,
        "trainer.rollout_n_gpus=1",
        "trainer.async_level=2",
        "trainer.total_training_steps=5",
        *words,
    )
    trainer, batches = fit(game_config(tiny_game, tmp_path, *own))
    steps = read_steps(tmp_path)
    groups = [8 * int(step.get("filter_groups/batches", 1)) for step in steps]
    assert sampler_of(trainer).memory.groups.sum() == sum(groups)
    assert not sampler_of(trainer).pending and len(batches) == 5


@pytest.mark.slow
def test_two_ranks_draw_and_remember_what_one_does(
    cluster: None, tiny_game: Path, tmp_path: Path
) -> None:
    own = (*GRPO, *SEEDS, *MIXED, "trainer.deterministic=true", "trainer.launcher=ray")
    drawn = []
    states = []
    for ranks in (1, 2):
        words = (*own, f"trainer.n_gpus_per_node={ranks}", "trainer.total_training_steps=4")
        trainer, batches = fit(game_config(tiny_game, tmp_path / str(ranks), *words))
        drawn.append([columns(batch, TASK_INDEX) for batch in batches])
        states.append(sampler_of(trainer).memory.state_dict())
    assert drawn[0] == drawn[1]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_memory_of_other_data_ends_the_run_with_a_sentence(
    tiny_game: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(argv_of(tiny_game, tmp_path, "trainer.total_training_steps=1"), EndingSignals()) == 0
    other = argv_of(tiny_game, tmp_path, "difficulty.seeds=25")
    assert run(other, EndingSignals()) == MEND
    said = capsys.readouterr().err
    assert "it is of 20 environment seeds, and there are 25 environment seeds" in said
    assert "Traceback" not in said
    forgetting = [*other, "difficulty.forget=true", "trainer.total_training_steps=2"]
    assert run(forgetting, EndingSignals()) == 0
    assert load_driver_state(tmp_path / "global_step_2").sampler["memory"]["groups"].sum() == 8


def test_the_page_has_a_table_of_the_tasks(tiny_game: Path, tmp_path: Path) -> None:
    words = ("trainer.total_training_steps=2", "difficulty.table_tasks=5")
    assert run(argv_of(tiny_game, tmp_path, *words), EndingSignals()) == 0
    table = json.loads((tmp_path / "page_tables/difficulty.json").read_text())
    assert table["title"] == "Tasks by difficulty" and len(table["rows"]) == 5
    assert all(row[0].startswith("seed ") and row[6] > 0 for row in table["rows"])
    played = int(
        (load_driver_state(tmp_path / "global_step_2").sampler["memory"]["groups"] > 0).sum()
    )
    assert table["note"].startswith(f"{played - 5} further tasks")
    page = (tmp_path / "report.html").read_text()
    assert "Tasks by difficulty" in page and table["rows"][0][0] in page


def test_groups_that_are_trained_on_as_they_end_are_told_of(
    tiny_game: Path, tmp_path: Path
) -> None:
    words = (*GRPO, *SEEDS, "trainer.train_finished_groups=true")
    words += ("actor_rollout_ref.actor.ppo_mini_batch_size=8",)
    trainer, _ = fit(game_config(tiny_game, tmp_path, *words))
    assert sampler_of(trainer).memory.groups.sum() == 16


def test_rows_that_are_played_with_tools_are_tasks(tiny_task: Path, tmp_path: Path) -> None:
    words = (*GRPO, *SAMPLER, "agent.tools=[calculator]", "data.max_prompt_length=200")
    words += ("data.val_files=null", "agent.parser=json")
    trainer, batches = fit(tiny_config(tiny_task, tmp_path, *words))
    truths = [
        row["reward_model"]["ground_truth"]
        for row in pq.read_table(tiny_task / "train.parquet").to_pylist()
    ]
    for batch in batches:
        assert [truths[task] for task in columns(batch, TASK_INDEX)] == [
            each["ground_truth"] for each in columns(batch, "reward_model")
        ]
    assert sampler_of(trainer).memory.groups.sum() == 16
