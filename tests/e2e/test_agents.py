"""Training of agents, end to end on a tiny model.

Games, failures, filtering, rewriting templates, env workers.
"""

from __future__ import annotations

import math
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.protocol import DataProto
from data.seeds import seed_for
from tests.cases import fast_and_long
from tests.conftest import PROJECT
from tests.e2e.agent_games import fate
from tests.e2e.test_ray import assert_same_step
from tests.e2e.test_resume import run_and_kill, tensors
from tests.e2e.test_training import ENGINES, ESTIMATORS, read_steps
from training.agent_trainer import AgentTrainer
from training.building import build_trainer
from training.config import PPOConfig
from training.config.loader import load_config
from training.config.reference import to_yaml
from training.ray_trainer import RayPPOTrainer
from training.run.validation_names import is_validation_reward
from workers.multi_turn_rollout import SyncMultiTurnRollout
from workers.rollout.episode import ENDINGS

GAMES = PROJECT / "tests/e2e/agent_games.py"
AGENT, ROLLOUT, ACTOR = "agent.environment", "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
GRPO = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4", f"{ACTOR}.ppo_epochs=1")
SEED = 1  # of a run whose config names none


def game_config(task: Path, run_dir: Path, *overrides: str) -> PPOConfig:
    """The quickstart's config on the session's tiny model.

    8 tasks a step, two steps, no validation.
    """
    argv = [
        "configs/quickstart.yaml",
        f"actor_rollout_ref.model.path={task}/model",
        f"trainer.default_local_dir={run_dir}",
        "data.train_batch_size=8",
        f"{ACTOR}.ppo_mini_batch_size=4",
        f"{ROLLOUT}.max_num_seqs=32",
        "agent.val_length=0",
        "trainer.total_training_steps=2",
        "trainer.logger=file",
        *overrides,
    ]
    return load_config(argv).config


def playing(name: str) -> tuple[str, ...]:
    return f"{AGENT}.path={GAMES}", f"{AGENT}.cls={name}"


def playing_in_turn(*names: str) -> tuple[str, ...]:
    template = ", ".join(f"{{path: {GAMES}, cls: {name}}}" for name in names)
    return f"{AGENT}.path=null", f"{AGENT}.cls=null", f"env_template=[{template}]"


def fit(
    config: PPOConfig, prepare: Callable[[Any], None] = lambda trainer: None
) -> tuple[Any, list[DataProto]]:
    """Trains, and returns the trainer, shut down, and each step's batch as it was trained on."""
    trainer, batches = build_trainer(config), []

    def keep(batch: DataProto) -> None:
        if not batch.meta_info["validate"]:
            batches.append(batch)

    trainer.on_batch = keep
    prepare(trainer)
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.shutdown()
    return trainer, batches


def seeds_of(step: int, tasks: int = 8, first: int = 0) -> list[int]:
    return [seed_for(SEED, step, group) for group in range(first, first + tasks)]


def endings(metrics: dict[str, Any]) -> dict[str, int]:
    """Those that there are."""
    return {name: int(count) for name in ENDINGS if (count := metrics[f"agent/ending/{name}"])}


def facts_of(batch: DataProto) -> list[dict[str, Any]]:
    return [
        facts
        for facts in batch.drop_dummies().non_tensor_batch["episode_facts"]
        if facts is not None
    ]


def assert_finite(trainer: Any, steps: list[dict[str, Any]]) -> None:
    bad = {name for step in steps for name, value in step.items() if not math.isfinite(value)}
    assert not bad
    for tensor in trainer.actor_rollout_wg.worker.module.state_dict().values():
        assert torch.isfinite(tensor).all()


def without_times(run_dir: Path) -> list[dict[str, Any]]:
    timed = ("timing", "perf/")
    return [
        {
            name: v
            for name, v in step.items()
            if not name.startswith(timed) and "seconds" not in name
        }
        for step in read_steps(run_dir)
    ]


# The game


@pytest.mark.parametrize("estimator", fast_and_long(ESTIMATORS, fast=["gae", "grpo"]))
def test_two_steps_in_the_game_change_the_weights_and_count_every_episode(
    tiny_game, tmp_path, estimator
) -> None:
    settings = ESTIMATORS[estimator]
    config = game_config(
        tiny_game,
        tmp_path,
        f"algorithm.adv_estimator={estimator}",
        f"algorithm.use_kl_in_reward={settings['use_kl_in_reward']}",
        f"{ACTOR}.ppo_epochs={settings['ppo_epochs']}",
        f"{ACTOR}.use_kl_loss={estimator == 'grpo'}",
        f"{ROLLOUT}.n={settings['n']}",
        *("data.train_batch_size=32", f"{ACTOR}.ppo_mini_batch_size=16"),  # of which some win
        "agent.val_length=6",
    )
    trainer, batches = fit(config)
    before = AutoModelForCausalLM.from_pretrained(tiny_game / "model").state_dict()
    after = trainer.actor_rollout_wg.worker.module.state_dict()
    assert sum(not torch.equal(before[name], after[name]) for name in before) >= len(before) - 1
    steps = read_steps(tmp_path)
    assert_finite(trainer, steps)
    assert [step["step"] for step in steps] == [0, 1, 2]
    for step, batch in zip(steps[1:], batches, strict=True):
        facts = facts_of(batch)
        assert sum(endings(step).values()) == len(facts) == 32 * settings["n"]
        assert step["agent/turns/mean"] == np.mean([fact["turns"] for fact in facts])
        assert 1 <= step["agent/turns/mean"] <= step["agent/turns/max"] <= 4
        assert (
            0
            < step["agent/env_seconds/mean"]
            <= step["agent/env_seconds/max"]
            <= step["agent/episode_seconds/max"]
        )
        assert step["training/rollout_probs_diff_max"] < 1e-4
        assert ("critic/vf_loss" in step) == (estimator == "gae")
    assert max(step["actor/grad_norm"] for step in steps[1:]) > 0
    assert "val-core/TerseGuessNumber/reward/mean@1" in steps[0].keys() & steps[2].keys()


def test_validation_plays_the_same_tasks_every_time_and_none_of_trainings(
    tiny_game, tmp_path
) -> None:
    episodes: dict[tuple[int, bool], list[int]] = {}

    def watch(trainer: AgentTrainer) -> None:
        def keep(batch: DataProto) -> None:
            meta, seeds = batch.meta_info, batch.non_tensor_batch["env_seed"].tolist()
            episodes.setdefault((meta["global_steps"], meta["validate"]), []).extend(seeds)

        trainer.on_batch = keep

    sizes = (
        "agent.val_length=6",
        "data.val_batch_size=4",
        "trainer.test_freq=1",
        "trainer.deterministic=true",
    )
    fit(
        game_config(
            tiny_game, tmp_path, *sizes, f"{ACTOR}.optim.lr=1e-12", "critic.optim.lr=1e-12"
        ),
        watch,
    )
    assert episodes[0, True] == episodes[1, True] == episodes[2, True]
    assert len(set(episodes[0, True])) == 6
    assert not set(episodes[0, True]) & {*episodes[1, False], *episodes[2, False]}
    assert not set(episodes[1, False]) & set(episodes[2, False])
    name = "val-core/TerseGuessNumber/reward/mean@1"
    values = [step[name] for step in read_steps(tmp_path)]
    assert len(set(values)) == 1, "a policy that does not learn plays the same games alike"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_deterministic_run_is_repeated_number_by_number(tiny_game, tmp_path, engine) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm")
    for name in ("a", "b"):
        fit(
            game_config(
                tiny_game, tmp_path / name, "trainer.deterministic=true", f"{ROLLOUT}.name={engine}"
            )
        )
    steps, again = (without_times(tmp_path / name) for name in ("a", "b"))
    assert len(steps) == 2
    assert steps == again


class Interrupted(Exception):
    """Stands for a Ctrl-C."""


def end_after(steps: int) -> Callable[[Any], None]:
    def prepare(trainer: RayPPOTrainer) -> None:
        inner = trainer.train_step

        def step(rows: dict[str, Any]) -> dict[str, float]:
            if trainer.global_steps > steps:
                raise Interrupted
            return inner(rows)

        trainer.train_step = step  # type: ignore[method-assign]

    return prepare


def assert_same_end(one: Path, other: Path, step: int) -> None:
    for part in ("actor/model", "actor/optimizer", "critic/model", "critic/optimizer"):
        if (one / f"global_step_{step}" / part).exists():
            a, b = (
                tensors(one / f"global_step_{step}" / part),
                tensors(other / f"global_step_{step}" / part),
            )
            assert a.keys() == b.keys()
            assert not [name for name in a if not torch.equal(a[name], b[name])], part
    assert without_times(one) == without_times(other)


@pytest.mark.parametrize(
    "engine", ["hf", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])]
)
def test_an_interrupted_run_ends_bitwise_like_one_that_was_not(tiny_game, tmp_path, engine) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm")
    fixed = (
        "trainer.deterministic=true",
        f"{ROLLOUT}.name={engine}",
        "agent.val_length=4",
        "trainer.test_freq=1",
    )
    fixed += (
        "trainer.save_freq=1",
        "trainer.total_training_steps=4",
        *playing("Fragile"),
        "agent.on_failure=mask",
    )
    fit(game_config(tiny_game, tmp_path / "whole", *fixed))
    with pytest.raises(Interrupted):
        fit(game_config(tiny_game, tmp_path / "broken", *fixed), end_after(2))
    fit(game_config(tiny_game, tmp_path / "broken", *fixed))
    assert_same_end(tmp_path / "whole", tmp_path / "broken", step=4)


# Failures


@pytest.mark.parametrize("on_failure", ["zero", "mask", "refill"])
def test_failures_are_counted_exactly_and_settled_as_configured(
    tiny_game, tmp_path, on_failure
) -> None:
    settings = (
        f"agent.on_failure={on_failure}",
        "agent.max_refills=2",
        "algorithm.norm_adv_by_std_in_grpo=false",
    )
    trainer, batches = fit(game_config(tiny_game, tmp_path, *GRPO, *playing("Fragile"), *settings))
    steps = read_steps(tmp_path)
    assert_finite(trainer, steps)
    for number, (step, batch) in enumerate(zip(steps, batches, strict=True), start=1):
        failing = sum(fate(seed) != "fine" for seed in seeds_of(number)) * 4
        assert 0 < failing < 32, "or nothing is tested"
        assert endings(step) == {"done": 32 - failing, "env_crash": failing}
        assert step["agent/retries"] == (2 * failing if on_failure == "refill" else 0)
        assert step["response/aborted_ratio"] == pytest.approx(
            0 if on_failure == "zero" else failing / 32
        )
        # A failing episode's first turn is the last that said anything.
        assert step["agent/info/turn/mean"] == 2 - (failing / 32 if on_failure == "zero" else 0)
        check_group_advantages(batch)


def check_group_advantages(batch: DataProto) -> None:
    """Computes Dr. GRPO by hand: a reward less its group's mean of those that sampled."""
    batch = batch.drop_dummies()
    live = batch.batch["response_mask"].any(dim=1)
    scores = batch.batch["environment_rewards"].sum(dim=1)
    uids = batch.non_tensor_batch["uid"]
    for row in range(len(batch)):
        group = [scores[k].item() for k in range(len(batch)) if uids[k] == uids[row] and live[k]]
        expected = scores[row].item() - sum(group) / len(group) if live[row] else 0.0
        sampled = batch.batch["response_mask"][row].float()
        torch.testing.assert_close(
            batch.batch["advantages"][row], expected * sampled, atol=1e-5, rtol=0
        )


def test_a_masked_member_leaves_its_groups_mean(tiny_game, tmp_path) -> None:
    """The first two resets of every task fail, so that two of a group's four members are left."""
    flaky = (*playing("Flaky"), f"{AGENT}.kwargs.folder={tmp_path}/counts", "agent.on_failure=mask")
    (tmp_path / "counts").mkdir()
    config = game_config(
        tiny_game, tmp_path, *GRPO, *flaky, "algorithm.norm_adv_by_std_in_grpo=false"
    )
    _, batches = fit(config)
    for step, batch in zip(read_steps(tmp_path), batches, strict=True):
        assert endings(step) == {"done": 16, "env_crash": 16}
        live = batch.batch["response_mask"].any(dim=1).numpy()
        assert set(Counter(batch.non_tensor_batch["uid"][live]).values()) == {2}
        assert not batch.batch["advantages"][torch.from_numpy(~live)].any()
        check_group_advantages(batch)


def test_refill_plays_what_crashed_again_and_nothing_else(tiny_game, tmp_path) -> None:
    flaky = (
        *playing("Flaky"),
        f"{AGENT}.kwargs.folder={tmp_path}/counts",
        "agent.on_failure=refill",
    )
    (tmp_path / "counts").mkdir()
    _, batches = fit(game_config(tiny_game, tmp_path, *GRPO, *flaky))
    for step, batch in zip(read_steps(tmp_path), batches, strict=True):
        assert endings(step) == {"done": 32}
        assert step["agent/retries"] == 16, "two crashes in each of eight tasks"
        assert step["response/aborted_ratio"] == 0
        assert {fact["turns"] for fact in facts_of(batch)} == {2}, (
            "nothing of the first attempt is left"
        )
        assert (batch.batch["turn_ids"].max(dim=1).values == 1).all()


@pytest.mark.long
def test_an_episode_that_ran_out_of_time_is_not_played_again(tiny_game, tmp_path) -> None:
    slow = (*playing("Hanging"), "agent.on_failure=refill", "agent.step_timeout_s=1.5")
    fit(game_config(tiny_game, tmp_path, *slow, "trainer.total_training_steps=1"))
    (step,) = read_steps(tmp_path)
    hanging = sum(fate(seed) != "fine" for seed in seeds_of(1))
    assert endings(step) == {"done": 8 - hanging, "env_timeout": hanging}
    assert step["agent/retries"] == 0
    assert step["response/aborted_ratio"] == 0, (
        "what the policy did before is trained on, with a reward of zero"
    )


@pytest.mark.parametrize(
    "estimator",
    fast_and_long(["gae", "grpo", "rloo", "reinforce_plus_plus"], fast=["gae", "grpo"]),
)
@pytest.mark.parametrize("environment", ["Doomed", "DoomedTasks"])
def test_failed_groups_and_failed_batches_give_numbers(
    tiny_game, tmp_path, estimator, environment
) -> None:
    settings = (
        f"algorithm.adv_estimator={estimator}",
        "agent.on_failure=mask",
        *playing(environment),
    )
    settings += (
        "algorithm.use_kl_in_reward=true",
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.entropy_coeff=0.01",
    )
    settings += ("agent.max_failure_rate=1",)
    trainer, _ = fit(game_config(tiny_game, tmp_path, f"{ROLLOUT}.n=2", *settings))
    steps = read_steps(tmp_path)
    assert_finite(trainer, steps)
    for number, step in enumerate(steps, start=1):
        failing = (
            8 if environment == "Doomed" else sum(fate(seed) != "fine" for seed in seeds_of(number))
        )
        assert step["agent/ending/env_crash"] == 2 * failing
        assert step["response/aborted_ratio"] == failing / 8


# Agents and environments of one's own


def test_an_agent_class_of_ones_own_is_trained_around_a_bare_environment(
    tiny_game, tmp_path
) -> None:
    own = (f"agent.cls.path={GAMES}", "agent.cls.name=Counting", *playing("Shell"))
    trainer, batches = fit(game_config(tiny_game, tmp_path, *own))
    assert_finite(trainer, read_steps(tmp_path))
    for batch in batches:
        assert (batch.batch["environment_rewards"].sum(dim=1) == 1 + 2 + 3).all()
        prompt = trainer.tokenizer.decode(batch.batch["prompts"][0], skip_special_tokens=True)
        assert "the number guess" in prompt, "what the agent said, not the environment"


def test_agents_play_the_environments_of_env_template_in_turn(tiny_game, tmp_path) -> None:
    sizes = (
        "agent.agent_length=5",
        f"{ACTOR}.ppo_mini_batch_size=5",
        "agent.val_length=3",
        f"{ROLLOUT}.n=2",
    )
    trainer, batches = fit(
        game_config(tiny_game, tmp_path, *playing_in_turn("Even", "Higher"), *sizes)
    )
    names = ["Even", "Even", "Higher", "Higher", "Even", "Even", "Higher", "Higher", "Even", "Even"]
    for step, batch in zip(read_steps(tmp_path)[1:], batches, strict=True):
        assert sum(endings(step).values()) == 10, "agent_length, not data.train_batch_size"
        assert batch.non_tensor_batch["data_source"].tolist() == names
        texts = trainer.tokenizer.batch_decode(batch.batch["prompts"])
        assert ["guess the number" in text for text in texts] == [name == "Even" for name in names]
    found = {name for name in read_steps(tmp_path)[0] if is_validation_reward(name)}
    assert found == {"val-core/Even/reward/mean@1", "val-core/Higher/reward/mean@1"}


def test_a_reward_function_replaces_the_environments_rewards(tiny_game, tmp_path) -> None:
    own = (
        f"custom_reward_function.path={GAMES}",
        "custom_reward_function.name=reward_fn",
        *playing("Fragile"),
    )
    trainer, batches = fit(game_config(tiny_game, tmp_path, *own))
    assert_finite(trainer, read_steps(tmp_path))
    for number, batch in enumerate(batches, start=1):
        rewards, mask = batch.batch["environment_rewards"], batch.batch["response_mask"]
        for row, seed in enumerate(seeds_of(number)):
            expected = torch.zeros_like(rewards[row])
            if fate(seed) == "fine":
                expected[mask[row].nonzero().max()] = (
                    21  # two turns, and the environment is the trajectory's
                )
            torch.testing.assert_close(rewards[row], expected)


def test_failures_in_groups_that_are_dropped_are_counted(tiny_game, tmp_path) -> None:
    """A task that always fails has no variance, so that none of its episodes is trained on."""
    settings = (
        "agent.on_failure=mask",
        *playing("DoomedTasks"),
        "algorithm.filter_groups.enable=true",
    )
    fit(game_config(tiny_game, tmp_path, *GRPO, *settings))
    for number, step in enumerate(read_steps(tmp_path), start=1):
        tasks = seeds_of(number, 8 * int(step["filter_groups/batches"]))
        failing = 4 * sum(fate(seed) != "fine" for seed in tasks)
        assert endings(step) == {"done": 4 * len(tasks) - failing, "env_crash": failing}


# The rollout by itself


def test_the_rollout_is_driven_from_python_without_a_trainers_step(tiny_game, tmp_path) -> None:
    others = environment_threads()
    sizes = ("agent.agent_length=6", f"{ACTOR}.ppo_mini_batch_size=6", "trainer.deterministic=true")
    trainer = build_trainer(
        game_config(tiny_game, tmp_path, *sizes, *playing_in_turn("Even", "Higher"))
    )
    try:
        trainer.init_workers()
        runs = []
        for _ in range(2):
            rollout = SyncMultiTurnRollout(
                trainer.actor_rollout_wg, trainer.config, trainer.tokenizer
            )
            with pytest.raises(ValueError, match=r"call reset\(\) first"):
                rollout.rollout()
            runs.append([play_once(rollout) for _ in range(2)])
        seeds = [seed for batch in runs[0] for seed in batch.non_tensor_batch["env_seed"]]
        assert len(set(seeds)) == 12, "every reset gives fresh episodes"
        for batch, again in zip(*runs, strict=True):
            assert torch.equal(batch.batch["responses"], again.batch["responses"]), (
                "a run's episodes are its seed's"
            )
        rollout.close()
    finally:
        trainer.shutdown()
    assert environment_threads() <= others


def play_once(rollout: SyncMultiTurnRollout) -> DataProto:
    rollout.reset()
    with pytest.raises(ValueError, match=r"call rollout\(\) first"):
        rollout.build_update_batch()
    facts = rollout.rollout()
    batch = rollout.build_update_batch()
    assert len(facts) == len(batch) == 6
    assert [fact["environment"] for fact in facts] == [0, 1] * 3, "each environment has its turn"
    assert [fact["turns"] for fact in facts] == (
        batch.batch["turn_ids"].max(dim=1).values + 1
    ).tolist()
    return batch


def test_a_run_that_fails_while_it_starts_ends_with_its_own_error(tiny_game, tmp_path) -> None:
    shutil.copytree(tiny_game / "model", tmp_path / "torn")
    # As long as it says that it is, so that only its reading finds what it holds.
    header = b'{"weight": {"dtype": "F99", "shape": [0], "data_offsets": [0, 0]}}'
    weights = tmp_path / "torn/model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    others = environment_threads()
    trainer = build_trainer(game_config(tiny_game, tmp_path, f"critic.model.path={tmp_path}/torn"))
    with pytest.raises(Exception, match="header"):
        trainer.init_workers()
    trainer.shutdown()
    assert environment_threads() <= others


def environment_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("environment")}


# Several rows an episode


FORGETFUL = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} "
    "{% if m['role'] == 'assistant' and not loop.last"
    " and m['content'].strip() in ['1', '3', '5', '7', '9'] %}number"
    "{% else %}{{ m['content'] }}{% endif %} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


@pytest.fixture(scope="module")
def forgetful_game(tiny_game: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny game under a template that drops odd guesses from the history, like thinking."""
    folder = tmp_path_factory.mktemp("forgetful")
    shutil.copytree(tiny_game / "model", folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = FORGETFUL
    tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_episodes_of_several_rows_are_trained_and_counted_once(
    forgetful_game, tmp_path, estimator
) -> None:
    """The critic's mini-batches are half of the actor's, and hold the same rows."""
    settings = (
        f"algorithm.adv_estimator={estimator}",
        f"{ROLLOUT}.n=4",
        "data.max_prompt_length=40",
    )
    settings += ("critic.ppo_mini_batch_size=2", "agent.val_length=6")
    trainer, batches = fit(game_config(forgetful_game, tmp_path, *settings))
    steps = read_steps(tmp_path)
    assert_finite(trainer, steps)
    for step, batch in zip(steps[1:], batches, strict=True):
        real = batch.drop_dummies()
        rows_of = Counter(real.non_tensor_batch["episode_id"])
        assert len(rows_of) == sum(endings(step).values()) == 32
        assert max(rows_of.values()) > 1
        assert len(batch) % (4 if estimator == "gae" else 2) == 0
        assert step["training/rollout_probs_diff_max"] < 1e-4, "each row is what the engine saw"
        check_rows_of_episodes(real)
        lengths = real.batch["attention_mask"][:, 40:].sum(dim=1)
        per_episode = [
            sum(lengths[real.non_tensor_batch["episode_id"] == name].tolist()) for name in rows_of
        ]
        assert step["response_length/mean"] == pytest.approx(np.mean(per_episode))
        assert step["response_length/max"] == max(per_episode)
        scores = real.batch["token_level_scores"].sum(dim=1)
        assert step["critic/score/mean"] == pytest.approx(scores.sum().item() / 32)
        if estimator in ("grpo", "rloo"):
            check_equal_within_episodes(real)
    assert any((batch.non_tensor_batch["uid"] == "dummy").any() for batch in batches), (
        "mini-batches were evened out"
    )


def check_rows_of_episodes(batch: DataProto) -> None:
    """Checks that rows count from 0, turns go on over them, and an episode has its rewards once."""
    for name in set(batch.non_tensor_batch["episode_id"]):
        rows = np.flatnonzero(batch.non_tensor_batch["episode_id"] == name)
        rows = rows[np.argsort(batch.non_tensor_batch["episode_row"][rows])]
        assert batch.non_tensor_batch["episode_row"][rows].tolist() == list(range(len(rows)))
        turns = [
            turn
            for row in rows
            for turn in sorted(set(batch.batch["turn_ids"][row].tolist()) - {-1})
        ]
        (facts,) = [
            facts for facts in batch.non_tensor_batch["episode_facts"][rows] if facts is not None
        ]
        assert turns == list(range(facts["turns"]))
        assert batch.batch["environment_rewards"][rows].sum() in (0, 1)
        assert len(set(batch.non_tensor_batch["uid"][rows])) == 1


def check_equal_within_episodes(batch: DataProto) -> None:
    """An outcome's advantage is that of all the episode's sampled tokens.

    A group's sum to zero over its episodes.
    """
    of_episode: dict[str, set[float]] = {}
    for row, name in enumerate(batch.non_tensor_batch["episode_id"]):
        sampled = batch.batch["response_mask"][row].bool()
        of_episode.setdefault(name, set()).update(batch.batch["advantages"][row][sampled].tolist())
    assert all(len(values) == 1 for values in of_episode.values())
    of_group: dict[str, float] = {}
    for name, (value,) in of_episode.items():
        uid = name.rpartition(".")[0]
        of_group[uid] = of_group.get(uid, 0.0) + value
    assert list(of_group.values()) == pytest.approx([0.0] * 8, abs=1e-5)


# Env workers


def test_environments_in_processes_leave_nothing_behind(tiny_game, tmp_path) -> None:
    where = (
        f"{AGENT}.isolation=process",
        f"{AGENT}.num_workers=4",
        *playing("Fragile"),
        "agent.on_failure=refill",
    )
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    threads = set(threading.enumerate())
    fit(game_config(tiny_game, tmp_path, *where, "agent.max_refills=1", "agent.val_length=4"))
    for number, step in enumerate(read_steps(tmp_path)[1:], start=1):
        failing = sum(fate(seed) != "fine" for seed in seeds_of(number))
        assert endings(step) == {
            name: n for name, n in (("done", 8 - failing), ("env_crash", failing)) if n
        }
        assert step["agent/retries"] == failing
    left = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.pid not in before
    ]
    assert not [process.cmdline() for process in left if process.status() != psutil.STATUS_ZOMBIE]
    assert not {
        thread.name
        for thread in set(threading.enumerate()) - threads
        if "environment" in thread.name
    }


# Ray


def fit_over_ray(task: Path, folder: Path, *overrides: str, ranks: int = 2) -> list[DataProto]:
    layout = ("trainer.launcher=ray", f"trainer.n_gpus_per_node={ranks}")
    return fit(game_config(task, folder, *layout, *overrides))[1]


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_two_ranks_in_the_game_give_the_numbers_of_one(
    forgetful_game: Path, tmp_path: Path
) -> None:
    """On episodes of several rows, of which no two ranks have equally many."""
    fixed = (
        "trainer.deterministic=true",
        "data.max_prompt_length=40",
        "agent.val_length=5",
        "trainer.test_freq=1",
    )
    fixed += (f"{ROLLOUT}.n=2", *playing("Fragile"), "agent.on_failure=mask")
    fit(game_config(forgetful_game, tmp_path / "one", *fixed))
    fit_over_ray(forgetful_game, tmp_path / "two", *fixed)
    for one, two in zip(
        without_times(tmp_path / "one"), without_times(tmp_path / "two"), strict=True
    ):
        assert_same_step(one, two)


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_environments_as_ray_actors_are_counted_and_closed(tiny_game: Path, tmp_path: Path) -> None:
    where = (
        f"{AGENT}.isolation=ray",
        f"{AGENT}.num_workers=2",
        *playing("Fragile"),
        "data.train_batch_size=4",
    )
    fit_over_ray(tiny_game, tmp_path, *where, "trainer.total_training_steps=1", ranks=1)
    (step,) = read_steps(tmp_path)
    failing = sum(fate(seed) != "fine" for seed in seeds_of(1, tasks=4))
    assert endings(step) == {"done": 4 - failing, "env_crash": failing}
    deadline = time.monotonic() + 20
    while (left := living_actors()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def living_actors() -> list[str]:
    """Titles of the actors' processes, without those of Ray itself."""
    titles = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            titles.append(" ".join(process.cmdline()))
    rays_own = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
    return [
        title for title in titles if title.startswith("ray::") and not title.startswith(rays_own)
    ]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.usefixtures("cluster")
def test_ranks_that_share_an_engine_play_the_same_episodes(tiny_game: Path, tmp_path: Path) -> None:
    """The leader steps the environments and tells the other.

    Validation's five episodes do not divide by the ranks.
    """
    pytest.importorskip("vllm")
    shared = (
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        f"{ROLLOUT}.n=2",
        "agent.val_length=5",
    )
    batches = fit_over_ray(tiny_game, tmp_path, *shared, *playing("Fragile"))
    for number, (step, batch) in enumerate(
        zip(read_steps(tmp_path)[1:], batches, strict=True), start=1
    ):
        failing = 2 * sum(fate(seed) != "fine" for seed in seeds_of(number))
        assert endings(step) == {"done": 16 - failing, "env_crash": failing}
        assert len(set(batch.non_tensor_batch["episode_id"])) == 16
        assert step["training/rollout_probs_diff_max"] < 1e-4


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_whose_environments_are_stuck_ends_soon(tiny_game: Path, tmp_path: Path) -> None:
    stuck = (*playing("Stuck"), "agent.step_timeout_s=null", "trainer.launcher=ray")
    trainer = build_trainer(game_config(tiny_game, tmp_path, *stuck))
    trainer.init_workers()
    threading.Thread(target=trainer.fit, daemon=True).start()
    time.sleep(5)
    start = time.monotonic()
    trainer.shutdown()
    assert time.monotonic() - start < 40
    assert not living_actors()


@pytest.mark.slow
def test_killed_runs_in_the_game_end_bitwise_like_one_that_was_not(tiny_game, tmp_path) -> None:
    rng, steps = random.Random(1), 8
    argv = {name: kill_command(tiny_game, tmp_path / name, steps) for name in ("whole", "broken")}
    subprocess.run(argv["whole"], check=True, capture_output=True)
    kills = sum(not run_and_kill(argv["broken"], tmp_path / "broken", rng) for _ in range(3))
    assert kills >= 2
    subprocess.run(argv["broken"], check=True, capture_output=True)
    assert_same_end(tmp_path / "whole", tmp_path / "broken", step=steps)


def kill_command(task: Path, folder: Path, steps: int) -> list[str]:
    config = game_config(
        task,
        folder,
        "trainer.deterministic=true",
        "trainer.save_freq=1",
        f"trainer.total_training_steps={steps}",
        # How often the game breaks depends on what an untrained model says.
        "agent.max_failure_rate=1.0",
        *playing("Fragile"),
    )
    folder.with_suffix(".yaml").write_text(to_yaml(config))
    return [sys.executable, str(PROJECT / "main.py"), str(folder.with_suffix(".yaml"))]
