"""Tests verl's keys that mean something only together, its lists of defaults, and other words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.unit.config.helpers import ACTOR, ROLLOUT, checked, load, problems_of
from training.config import AlgoConfig
from training.config.explain import explain_values
from training.config.loader import ConfigError, load_config

ASYNCHRONOUS = [
    "actor_rollout_ref.hybrid_engine=False",
    "data.train_batch_size=0",
    "data.gen_batch_size=1",
    f"{ACTOR}.ppo_mini_batch_size=32",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=4",
    "rollout.total_rollout_steps=51200",
    "rollout.total_epochs=10",
    "rollout.test_freq=10",
    "async_training.staleness_threshold=0.1",
    "async_training.trigger_parameter_sync_step=4",
    "async_training.require_batches=2",
    "async_training.partial_rollout=False",
]


@pytest.mark.parametrize("given", [ASYNCHRONOUS, ASYNCHRONOUS[::-1]])
def test_an_asynchronous_run_of_verl_has_its_steps_and_staleness(given: list[str]) -> None:
    config = load(*given)
    trainer = config.trainer
    # 32 x 2 prompts an update of verl's, 4 of them between two sends of weights.
    assert config.data.train_batch_size == 256
    assert (trainer.rollout_n_gpus, trainer.async_level) == (4, 1)
    assert (trainer.total_training_steps, trainer.total_epochs, trainer.test_freq) == (200, 10, 10)
    assert not config.actor_rollout_ref.rollout.update_in_flight


def test_what_is_given_here_wins_over_an_asynchronous_run_of_verl() -> None:
    ours = ["trainer.async_level=3", "trainer.total_training_steps=7", "data.train_batch_size=64"]
    config = load(*ASYNCHRONOUS, *ours)
    trainer = config.trainer
    assert (trainer.async_level, trainer.total_training_steps) == (3, 7)
    assert config.data.train_batch_size == 64
    assert load(*ASYNCHRONOUS, "async_training.staleness_threshold=0").trainer.async_level == 0
    assert load(*ASYNCHRONOUS, "async_training.staleness_threshold=1.5").trainer.async_level == 2
    # Values at rest in our own YAML are not given.
    own_yaml = str(PROJECT / "configs/ppo_trainer.yaml")
    assert load(own_yaml, *ASYNCHRONOUS).trainer.rollout_n_gpus == 4
    (problem,) = problems_of("data.train_batch_size=0")
    assert "must be above 0" in problem


def test_a_teacher_of_verl_is_ours_in_any_order() -> None:
    teacher = "distillation.teacher_models.teacher_model.model_path=teacher"
    given = ["distillation.enabled=True", teacher, "algorithm.adv_estimator=grpo"]
    for order in (given, given[::-1]):
        config = load(*order)
        algorithm = config.algorithm
        assert (algorithm.adv_estimator, algorithm.distillation_task) == (
            "on_policy_distillation",
            "grpo",
        )
        assert config.actor_rollout_ref.ref.model.path == "teacher"
    loss = "distillation.distillation_loss"
    assert load(*given, f"{loss}.use_task_rewards=False").algorithm.distillation_task is None
    weighed = load(*given, f"{loss}.distillation_loss_coef=0.5").algorithm
    assert weighed.distillation_coef == 0.5
    assert load(*given[1:]).algorithm.adv_estimator == "grpo"
    (problem,) = problems_of(*given, f"{loss}.loss_mode=forward_kl_topk")
    assert "set distillation_loss.loss_mode=k1" in problem
    (problem,) = problems_of("distillation.teacher_models.math.model_path=teacher")
    assert "actor_rollout_ref.ref.model.path" in problem


def test_a_loss_of_distillation_that_is_another_here_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loss = "distillation.distillation_loss"
    load("distillation.enabled=True", f"{loss}.use_policy_gradient=True", f"{loss}.loss_mode=k1")
    assert "each token's advantage" not in caplog.text
    load("distillation.enabled=True", f"{loss}.use_policy_gradient=False")
    assert "here the teacher's log-ratio is each token's advantage" in caplog.text


def test_a_list_of_hydras_defaults_names_verls_file_and_others_beside_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "base.yaml").write_text("data: {seed: 5, max_prompt_length: 64}\n")
    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: ['file://verl/trainer/config']}\n"
        "defaults: [ppo_trainer, base, _self_]\n"
        "data: {seed: 6}\n"
    )
    config = load(f"--config-path={tmp_path}", "--config-name=mine")
    assert (config.data.seed, config.data.max_prompt_length) == (6, 64)
    assert "`defaults: ppo_trainer` (mine.yaml) has no effect here" in caplog.text


def test_the_list_of_verls_keys_stands_under_explain_with_errors_too() -> None:
    many = [f"{ACTOR}.profiler.key{number}=1" for number in range(9)]
    with pytest.raises(ConfigError) as caught:
        load_config([*many, "data.seed=x", "--explain"])
    assert caught.value.loaded is not None
    assert "profiler.key8=1 (command line) has no effect here" in explain_values(
        caught.value.loaded
    )


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("lr=1", f"{ACTOR}.optim.lr"),
        ("learning_rate=1", f"{ACTOR}.optim.lr"),
        ("actor.learning_rate=1", f"{ACTOR}.optim.lr"),
        ("actor.lr=1", f"{ACTOR}.optim.lr"),
        (f"{ACTOR}.learning_rate=1", f"{ACTOR}.optim.lr"),
        (f"{ACTOR}.optim.learning_rate=1", f"{ACTOR}.optim.lr"),
        ("critic.learning_rate=1", "critic.optim.lr"),
        ("critic_lr=1", "critic.optim.lr"),
        ("model=x", "actor_rollout_ref.model.path"),
        ("model_path=x", "actor_rollout_ref.model.path"),
        ("critic.model_path=x", "critic.model.path"),
        ("batch_size=4", "data.train_batch_size"),
        ("epochs=4", "trainer.total_epochs"),
        ("max_steps=4", "trainer.total_training_steps"),
        ("n_gpus=4", "trainer.n_gpus_per_node"),
        ("rollout_n=4", f"{ROLLOUT}.n"),
        ("max_tokens=4", "data.max_response_length"),
    ],
)
def test_other_words_for_a_setting_lead_to_it(override: str, suggestion: str) -> None:
    (problem,) = problems_of(override)
    assert problem.endswith(f"there is no such key. Did you mean {suggestion!r}?")


def test_settings_of_ones_own_code_have_a_place_and_are_had_by_name() -> None:
    (problem,) = problems_of("algorithm.codapo_top_k=4")
    assert problem.endswith(
        "A setting of your own code goes to algorithm.custom_kwargs.codapo_top_k"
    )
    algorithm = AlgoConfig(custom_kwargs={"codapo_top_k": 4})
    assert algorithm.get("codapo_top_k", 1) == algorithm["codapo_top_k"] == 4
    assert algorithm.get("codapo_top", 1) == 1
    with pytest.raises(KeyError):
        algorithm["codapo_top"]


def test_a_name_that_reads_as_null_is_said(caplog: pytest.LogCaptureFixture) -> None:
    config = load("custom_reward_function.name=none")
    assert config.custom_reward_function.name == "compute_score"
    (message,) = caplog.messages
    assert message == (
        "custom_reward_function.name=none (command line) is null, not a name: compute_score stays"
    )
    caplog.clear()
    load("custom_reward_function.name=null")
    assert caplog.messages == []


def test_paths_may_begin_as_verls_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    file = tmp_path / "package" / "sampler.py"
    file.touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for path in ("pkg://package.sampler", f"file://{file}"):
        assert load(f"data.sampler.class_path={path}").data.sampler.class_path == str(file)


def test_values_at_rest_for_engines_and_ray_say_nothing(
    runnable: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    rest = [
        f"{ROLLOUT}.engine_kwargs={{vllm: {{}}, sglang: {{}}}}",
        "ray_kwargs.ray_init={num_cpus: null, runtime_env: {py_executable: null}}",
    ]
    assert checked(runnable, *rest) == []
    assert "has no effect" not in caplog.text
    checked(runnable, "ray_kwargs.ray_init={num_cpus: 4}")
    assert "ray_kwargs.ray_init has no effect" in caplog.text
