"""Alarms: each seeded fault is named within two steps, and a run without a fault raises none."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from features.alarms.catalogue import ADVICE
from features.alarms.monitor import Alarms
from features.alarms.rules import slow_episodes
from tests.e2e.test_agents import forgetful_game as forgetful_game
from tests.e2e.test_agents import game_config, playing, playing_in_turn
from tests.e2e.test_training import read_steps, tiny_config
from tests.features.alarms.runs import seeded_faults as faults
from tests.features.alarms.runs.seeded_faults import Fault
from training.building import build_trainer
from training.config import PPOConfig
from training.core_algos import registry
from training.observers import RunStopped, StepReport

BEGINS = 2
GRPO = (
    *(
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_epochs=1",
    ),
    *playing("Steady"),
)
TWO_GAMES = playing_in_turn("Steady", "Fragile")
KL = ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
PPO = (
    "data.train_batch_size=32",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    *playing("Steady"),
)
# name: (what is broken, the alarm, the kind of run, its own settings)
GAME: dict[str, tuple[Fault, str, tuple[str, ...]]] = {
    "no weight is synced": (faults.kept(), "engine_stale", GRPO),
    "a tensor is stale": (faults.kept("model.layers.0.mlp.down_proj.weight"), "engine_stale", GRPO),
    "a norm is stale": (faults.kept("model.norm.weight"), "engine_differs", GRPO),
    "tensors are swapped": (faults.engine_weights(faults.swapped), "engine_differs", GRPO),
    "a tensor is scaled": (faults.engine_weights(faults.noisy), "engine_differs", GRPO),
    "the engine rounds": (faults.engine_weights(faults.short_type), "engine_differs", GRPO),
    "the engine's temperature": (faults.sampling(temperature=0.7), "log_probs_differ", GRPO),
    "the trainer's temperature": (faults.other_temperature, "log_probs_differ", GRPO),
    "a top_k nobody asked for": (faults.sampling(top_k=3), "log_probs_differ", GRPO),
    "greedy answers": (faults.sampling(temperature=0.0), "equal_answers", GRPO),
    "equal seeds in a group": (faults.equal_seeds, "equal_answers", GRPO),
    "the engine's log-probs shifted": (
        faults.field("rollout_log_probs", lambda x: x.roll(1, 1)),
        "log_probs_differ",
        GRPO,
    ),
    "answers re-tokenised": (
        faults.field("responses", faults.retokenised),
        "log_probs_differ",
        GRPO,
    ),
    "other observations": (faults.generated(faults.other_observations), "turn_differs", GRPO),
    "mask shifted by one": (
        faults.field("response_mask", lambda x: x.roll(1, 1)),
        "unsampled_tokens",
        GRPO,
    ),
    "mask holds observations": (faults.generated(faults.attended), "unsampled_tokens", GRPO),
    "a turn's end is never sampled": (faults.no_end, "length_pinned", GRPO),
    "a log-prob is NaN": (
        faults.field("rollout_log_probs", lambda x: x * float("nan")),
        "not_finite",
        GRPO,
    ),
    "reward a token early": (faults.scores(faults.token_earlier), "reward_misplaced", GRPO),
    "reward on the first token": (faults.scores(faults.on_first_tokens), "reward_misplaced", GRPO),
    "reward on the padding": (faults.scores(faults.at_the_end), "reward_misplaced", GRPO),
    "reward is constant": (faults.scores(faults.constant), "reward_constant", GRPO),
    "one game's reward is constant": (
        faults.scores(faults.one_source_constant),
        "reward_constant",
        (*GRPO[:3], *TWO_GAMES),
    ),
    "reward is constant in groups": (faults.scores(faults.by_group), "advantages_zero", GRPO),
    "group ids shuffled": (faults.column("uid", lambda x: np.roll(x, 1)), "groups_mixed", GRPO),
    "a group lost a member": (faults.column("uid", faults.lost_member), "groups_mixed", GRPO),
    "learning rate of a typing error": (faults.rate(0.5), "kl_explodes", GRPO),
    "advantages lost": (faults.estimator(faults.nothing), "advantages_zero", GRPO),
    "chat template changed": (faults.template, "template_changed", GRPO),
    "a gradient is NaN": (faults.poisoned_gradient, "gradient_not_finite", GRPO),
    "gradients are lost": (faults.no_gradient, "gradient_zero", GRPO),
    "the optimiser is idle": (faults.idle_optimizer, "policy_still", GRPO),
    "learning rate 0": (faults.rate(0.0), "rate_zero", GRPO),
    "learning rate far too high": (faults.rate(0.2), "kl_jump", GRPO),
    "dropout in the update": (faults.dropout, "ratio_not_one", GRPO),
    "old log-probs of other rows": (faults.rows_of_another_order, "ratio_not_one", GRPO),
    "the critic's gradient is infinite": (faults.poisoned_critic, "gradient_not_finite", PPO),
}
PROMPTS: dict[str, tuple[Fault, str, tuple[str, ...]]] = {
    "prompts of other rows": (
        faults.field("prompts", lambda x: x.roll(1, 0)),
        "groups_mixed",
        GRPO[:3],
    ),
    "a score a token early": (faults.scores(faults.token_earlier), "reward_misplaced", GRPO[:3]),
}


def no_fault(trainer: Any) -> None:
    """Leaves all as it is."""


def watch(config: PPOConfig, fault: Fault = no_fault, begins: int = BEGINS) -> list[set[str]]:
    """Trains with the fault from step `begins` on (0: before any).

    Returns the alarms that stood at each step.
    """
    trainer = build_trainer(config)
    step = trainer.train_step

    def train_step(rows: Any) -> dict[str, float]:
        if trainer.global_steps == begins:
            fault(trainer)
        return step(rows)

    trainer.train_step = train_step
    before = dict(registry.ADV_ESTIMATOR_REGISTRY)
    try:
        trainer.init_workers()
        if begins == 0:
            fault(trainer)
        trainer.fit()
        alarms: Any = trainer.observers.named.get("alarms")
        assert alarms is None or not alarms.broken_rules
    finally:
        trainer.shutdown()
        registry.ADV_ESTIMATOR_REGISTRY.update(before)
    return [
        alarms_of(step)
        for step in read_steps(Path(config.trainer.run_dir))
        if "alarms/count" in step
    ]


def alarms_of(metrics: dict[str, Any]) -> set[str]:
    return {
        name.removeprefix("alarms/")
        for name in metrics
        if name.startswith("alarms/") and name != "alarms/count"
    }


def assert_named(alarms: list[set[str]], name: str) -> None:
    assert not any(alarms[: BEGINS - 1]), "it rang before the fault"
    assert name in alarms[BEGINS - 1] | alarms[BEGINS], f"rang: {alarms}"
    assert name in ADVICE


@pytest.mark.parametrize("what", GAME)
def test_a_fault_in_a_game_is_named_within_two_steps(
    tiny_game: Path, tmp_path: Path, what: str
) -> None:
    fault, name, settings = GAME[what]
    assert_named(
        watch(game_config(tiny_game, tmp_path, "trainer.total_training_steps=3", *settings), fault),
        name,
    )


@pytest.mark.parametrize("what", PROMPTS)
def test_a_fault_on_prompts_is_named_within_two_steps(
    tiny_task: Path, tmp_path: Path, what: str
) -> None:
    fault, name, settings = PROMPTS[what]
    assert_named(
        watch(tiny_config(tiny_task, tmp_path, "trainer.total_training_steps=3", *settings), fault),
        name,
    )


@pytest.mark.parametrize(
    ("name", "fault"), [("throughput_falls", faults.slow), ("memory_grows", faults.leak)]
)
def test_a_machine_that_fails_is_named_within_two_steps(
    tiny_game: Path, tmp_path: Path, name: str, fault: Fault
) -> None:
    config = game_config(tiny_game, tmp_path, "trainer.total_training_steps=6", *GRPO)
    try:
        alarms = watch(config, fault, begins=5)
    finally:
        faults.LEAK.clear()
    assert not any(alarms[:4])
    assert name in alarms[5]


def test_entropy_that_collapses_is_named(tiny_game: Path, tmp_path: Path) -> None:
    config = game_config(tiny_game, tmp_path, "trainer.total_training_steps=3", *GRPO)
    alarms = watch(config, faults.sharpened)
    assert "entropy_collapse" in alarms[1] | alarms[2]


def test_a_reward_bug_that_pays_for_empty_answers_is_named(tiny_game: Path, tmp_path: Path) -> None:
    """The bug is there from the start; it is named once the policy has found it."""
    stories = Path(__file__).parents[2] / "viewer/runs/story_games.py"
    settings = (
        *GRPO[:3],
        f"agent.environment.path={stories}",
        "agent.environment.cls=PaysForSilence",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "trainer.total_training_steps=4",
    )
    alarms = watch(game_config(tiny_game, tmp_path, *settings))
    assert not alarms[0] and "silence_paid" in alarms[3], f"rang: {alarms}"


STORIES = Path(__file__).parents[2] / "viewer/runs/story_games.py"
# name: (the game, the alarm, its own settings, the step by which it rings)
GAMES_WITH_FAULTS: dict[str, tuple[str, str, tuple[str, ...], int]] = {
    "some seeds are slow": ("SlowSeeds", "episodes_slow", ("data.train_batch_size=16",), 4),
    "replies are cut": ("Wordy", "observations_cut", ("agent.max_observation_chars=80",), 2),
}


@pytest.mark.parametrize("what", GAMES_WITH_FAULTS)
def test_a_game_that_is_at_fault_is_named(
    tiny_game: Path, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a machine that others use a step takes many times as long, and the game as long as always.
    monkeypatch.setattr(slow_episodes, "LEAST_SHARE", 0.02)
    game, name, settings, steps = GAMES_WITH_FAULTS[what]
    own = (f"agent.environment.path={STORIES}", f"agent.environment.cls={game}")
    number = f"trainer.total_training_steps={steps}"
    alarms = watch(game_config(tiny_game, tmp_path, *GRPO[:3], *own, number, *settings))
    assert not alarms[0] and name in set().union(*alarms), f"rang: {alarms}"


def test_a_resume_with_another_learning_rate_is_named_first(
    tiny_game: Path, tmp_path: Path
) -> None:
    settings = ("trainer.save_freq=1", "trainer.resume_mode=auto", *GRPO)
    first = (*settings, "trainer.total_training_steps=2")
    assert not any(watch(game_config(tiny_game, tmp_path, *first)))
    rate = "actor_rollout_ref.actor.optim.lr=0.2"
    second = (*settings, "trainer.total_training_steps=3", rate)
    watch(game_config(tiny_game, tmp_path, *second))
    told = [
        event
        for line in (tmp_path / "events.jsonl").read_text().splitlines()
        for event in [json.loads(line)]
        if event["kind"] == "alarm"
    ]
    assert told[0]["name"] in ("kl_jump", "kl_explodes") and told[0]["step"] == 3
    assert (
        "behind step 2 the run went on with actor_rollout_ref.actor.optim.lr=0.2"
        in (told[0]["text"])
    )


@pytest.mark.parametrize(
    "settings",
    [GRPO, PPO, (*GRPO, *KL), ("algorithm.adv_estimator=reinforce_plus_plus", *GRPO[1:])],
)
def test_a_run_without_a_fault_raises_no_alarm(
    tiny_game: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    assert not any(
        watch(game_config(tiny_game, tmp_path, "trainer.total_training_steps=6", *settings))
    )


@pytest.mark.parametrize("settings", [GRPO, (*PPO, "critic.ppo_mini_batch_size=8")])
def test_episodes_of_several_rows_and_dummies_raise_no_alarm(
    forgetful_game, tmp_path, settings
) -> None:
    more = ("trainer.total_training_steps=6", "data.max_prompt_length=40")
    assert not any(watch(game_config(forgetful_game, tmp_path, *settings, *more)))


@pytest.mark.parametrize(
    "what", ["no weight is synced", "tensors are swapped", "dropout in the update"]
)
def test_a_short_type_is_measured_by_the_runs_own_noise(
    tiny_game: Path, tmp_path: Path, what: str
) -> None:
    fault, name, settings = GAME[what]
    half = [f"actor_rollout_ref.{part}.dtype=bfloat16" for part in ("model", "rollout")]
    assert_named(
        watch(
            game_config(tiny_game, tmp_path, "trainer.total_training_steps=3", *settings, *half),
            fault,
        ),
        name,
    )


def test_a_batch_that_lacks_a_column_costs_a_rule_and_not_the_run(
    tiny_game: Path, tmp_path: Path, caplog
) -> None:
    trainer = build_trainer(game_config(tiny_game, tmp_path, *GRPO))
    trainer.init_workers()
    seen: list[Any] = []
    trainer.on_batch = seen.append
    trainer.fit()
    trainer.shutdown()
    batch = seen[-1]
    del batch.non_tensor_batch["uid"]
    metrics = {"actor/entropy": float("nan")}
    alarms = Alarms(trainer.observers.run)
    found = alarms.step_made(StepReport(step=1, batch=batch, metrics=metrics))
    assert "alarms/not_finite" in found
    assert (
        "alarms do without the rule mixed_groups: KeyError: " in caplog.text
        and "no 'uid'" in caplog.text
    )


def test_a_template_that_changed_between_two_runs_is_named(tiny_game: Path, tmp_path: Path) -> None:
    settings = ("trainer.save_freq=1", "trainer.resume_mode=auto", *GRPO)
    assert not any(
        watch(game_config(tiny_game, tmp_path, "trainer.total_training_steps=1", *settings))
    )
    config = game_config(tiny_game, tmp_path, "trainer.total_training_steps=2", *settings)
    assert "template_changed" in watch(config, faults.template, begins=2)[-1]


def test_rare_rewards_may_stay_away_for_as_long_as_chance_has_it(
    tiny_game: Path, tmp_path: Path
) -> None:
    """Where one episode in four earned something, 96 without may be chance; 128 may not."""
    trainer = build_trainer(game_config(tiny_game, tmp_path, *GRPO))
    trainer.init_workers()
    seen: list[Any] = []
    trainer.on_batch = seen.append
    trainer.fit()
    trainer.shutdown()
    batch, alarms = seen[-1], Alarms(trainer.observers.run)
    scores = batch.batch["token_level_scores"]
    rang = []
    for step in range(1, 8):
        scores.zero_()
        if step == 1:
            scores[:8, 0] = 1.0
        found = alarms.step_made(StepReport(step=step, batch=batch))
        rang.append("alarms/reward_constant" in found)
    assert len(batch) == 32 and rang == [False] * 4 + [True] * 3


def test_alarms_change_no_number(tiny_game: Path, tmp_path: Path) -> None:
    runs = {}
    for what in ("warn", "off"):
        folder = tmp_path / what
        watch(
            game_config(
                tiny_game, folder, f"alarms.mode={what}", "trainer.deterministic=true", *GRPO
            )
        )
        runs[what] = read_steps(folder)
    for watched, own in zip(runs["warn"], runs["off"], strict=True):
        names = {
            name
            for name in own
            if not name.startswith(("timing", "perf/", "agent/env_s", "agent/episode_s"))
        }
        assert {name: own[name] for name in names} == {name: watched[name] for name in names}
        assert not any(name.startswith(("canary/", "alarms/")) for name in own)


def test_stop_ends_the_run_behind_the_step_that_is_logged(tiny_game: Path, tmp_path: Path) -> None:
    settings = ("alarms.mode=stop", "trainer.total_training_steps=5", *GRPO)
    with pytest.raises(
        RunStopped,
        match=r"alarm engine_stale: the engine kept its old weights.*, since step 2; check",
    ):
        watch(game_config(tiny_game, tmp_path, *settings), faults.kept())
    assert [step["step"] for step in read_steps(tmp_path)] == [1, 2]


def test_an_alarm_is_said_again_after_twice_the_time(
    tiny_game: Path, tmp_path: Path, caplog
) -> None:
    with caplog.at_level(logging.WARNING, logger="features.alarms"):
        watch(
            game_config(tiny_game, tmp_path, "trainer.total_training_steps=6", *GRPO),
            faults.rate(0.0),
        )
    said = [message for message in caplog.messages if message.startswith("alarm rate_zero")]
    # It stands from step 2 on, and waits for step 3: said there, at 4 and at 6.
    assert (
        said == ["alarm rate_zero: actor/lr is 0, since step 2; check " + ADVICE["rate_zero"]] * 3
    )


def test_every_alarm_has_its_fault() -> None:
    tried = {name for _, name, _ in (*GAME.values(), *PROMPTS.values())}
    folder = Path(__file__).parent
    files = (
        "test_alarms.py",
        "silent_faults.py",
        "forty_faults.py",
        "test_silent_faults.py",
        "../../../e2e/test_tools_training.py",
        "../test_episode_rules.py",
    )
    text = "".join((folder / name).read_text() for name in files)
    tried.update(re.findall(r'"(?:alarms/)?(\w+)"', text))
    assert [name for name in ADVICE if name not in tried] == []


@pytest.mark.vllm
def test_vllm_that_keeps_its_weights_is_named_in_the_same_step(
    tiny_game: Path, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    settings = (*GRPO, "actor_rollout_ref.rollout.name=vllm", "trainer.total_training_steps=4")
    # What the engine sets for itself is not for the processes of later tests.
    with patch.dict(os.environ):
        alarms = watch(game_config(tiny_game, tmp_path, *settings), faults.deaf_engine, begins=3)
    assert alarms == [
        set(),
        set(),
        *[{"engine_stale", "engine_differs", *alarms[i]} for i in (2, 3)],
    ]
