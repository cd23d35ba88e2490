"""Tests verl's keys that mean something only together, its lists of defaults, and other words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.unit.config.helpers import ACTOR, ROLLOUT, checked, load, problems_of
from training.config import AlgoConfig, PPOConfig
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


WHOLE = PROJECT / "tests/features/verl/ppo_trainer.yaml"


def test_a_whole_ppo_trainer_yaml_of_verl_loads(caplog: pytest.LogCaptureFixture) -> None:
    loaded = load_config([str(WHOLE)], check=False)
    config = loaded.config
    # Links of all forms are followed.
    assert config.trainer.run_dir.endswith("checkpoints/verl_examples/gsm8k")
    assert config.actor_rollout_ref.actor.checkpoint.load_contents == (
        "model",
        "optimizer",
        "extra",
    )
    assert config.critic.ppo_mini_batch_size == 256
    assert config.actor_rollout_ref.rollout.response_length == 512
    assert config.trainer.n_gpus_per_node == 8
    (message,) = caplog.messages
    assert "of verl's keys (ppo_trainer.yaml) have no effect or another name" in message


def test_with_the_words_of_a_launch_script_it_is_a_run_that_can_begin(tiny_task: Path) -> None:
    rows = tiny_task / "train.parquet"
    words = [
        f"data.train_files={rows}",
        f"data.val_files={rows}",
        "data.train_batch_size=16",
        f"{ACTOR}.ppo_mini_batch_size=8",
        f"actor_rollout_ref.model.path={tiny_task}/model",
        f"critic.model.path={tiny_task}/model",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
        "critic.ppo_micro_batch_size_per_gpu=4",
        f"{ROLLOUT}.name=hf",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
        "data.max_prompt_length=12",
        "data.max_response_length=6",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.logger=console",
        "custom_reward_function.path=examples/tiny_prompts_reward.py",
    ]
    config = load_config([str(WHOLE), *words]).config
    assert (config.data.train_batch_size, config.critic.ppo_mini_batch_size) == (16, 8)


def test_the_groups_of_a_list_of_defaults_are_files_that_stand_under_their_package(
    tmp_path: Path,
) -> None:
    (tmp_path / "actor").mkdir()
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim/mine.yaml").write_text("lr: 3e-6\nweight_decay: 0.5\n")
    (tmp_path / "actor/mine.yaml").write_text(
        "defaults: [{../optim@optim: mine}, _self_]\n"
        "clip_ratio: 0.3\nclip_ratio_low: ${.clip_ratio}\noptim: {weight_decay: 0.25}\n"
    )
    (tmp_path / "run.yaml").write_text(
        f"defaults: [{{actor@{ACTOR}: mine}}, {{data@data: legacy_data}}, "
        "{model: null}, {override hydra/job_logging: disabled}, _self_]\n"
        f"{ACTOR}: {{clip_ratio: 0.4}}\n"
    )
    actor = load(str(tmp_path / "run.yaml")).actor_rollout_ref.actor
    assert (actor.optim.lr, actor.optim.weight_decay) == (3e-6, 0.25)
    assert (actor.clip_ratio, actor.clip_ratio_low) == (0.4, 0.4)


def test_a_group_whose_file_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"defaults: [{{actor@{ACTOR}: mine}}, _self_]\n")
    (problem,) = problems_of(str(tmp_path / "run.yaml"))
    assert "is Hydra's; write `extends: other.yaml`" in problem


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        (f"{ROLLOUT}.n_agent=5", f"{ROLLOUT}.n=5"),
        ("env.rollout.n=8", f"{ROLLOUT}.n=8"),
        ("env.max_steps=15", "agent.max_turn=15"),
        ("agent.max_steps=5", "agent.max_turn=5"),
        ("agent_proxy.max_turn=5", "agent.max_turn=5"),
        ("es_manager.train.env_groups=8", "data.train_batch_size=8"),
        ("es_manager.train.group_size=16", f"{ROLLOUT}.n=16"),
        ("actor_rollout_ref.agent.max_action_length=512", "agent.max_turn_tokens=512"),
        ("algorithm.gigpo.step_advantage_w=0.5", "algorithm.gigpo_step_weight=0.5"),
        ("step_advantage_w=0.5", "algorithm.gigpo_step_weight=0.5"),
        ("algorithm.gigpo.mode=mean_norm", "algorithm.norm_adv_by_std_in_grpo=false"),
        ("algorithm.gigpo.mode=mean_std_norm", "algorithm.norm_adv_by_std_in_grpo=true"),
        ("algorithm.high_level_gamma=0.95", "algorithm.turn_gamma=0.95"),
        ("data.train_data_num=7", "data.train_max_samples=7"),
        ("micro_batch_size_per_gpu=4", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"),
    ],
)
def test_a_key_of_a_project_that_stands_on_verl_has_our_word(override: str, ours: str) -> None:
    assert load(override) == load(ours)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.max_obs_length=500", "agent.max_observation_chars, in characters"),
        ("actor_rollout_ref.agent.max_obs_length=500", "agent.max_observation_chars"),
        ("data.max_start_length=2048", "data.max_prompt_length is the limit of a first prompt"),
        (f"{ACTOR}.state_masking=false", "agent.observation_loss_coef"),
        ("actor_rollout_ref.agent.action_stop_tokens=stops.txt", "no text ends a turn"),
        (f"{ROLLOUT}.stop=['</a>']", "no text ends a turn"),
        ("max_turns=2", "agent.max_turn, which counts the last answer"),
        ("actor_rollout_ref.agent.max_turns=2", "agent.max_turn, which counts the last answer"),
        ("retriever.url=http://x", "agent.tools="),
        ("env.env_name=Sokoban", "agent.environment.name"),
        ("algorithm.gigpo.mode=other", "algorithm.norm_adv_by_std_in_grpo"),
        (f"{ACTOR}.use_invalid_action_penalty=True", "return a lower reward"),
        (f"{ACTOR}.policy_loss.beta=0.1", "which beta?"),
        (f"{ROLLOUT}.rollout_filter_ratio=0.25", "algorithm.filter_groups.enable"),
        ("algorithm.bi_level_gae=true", "algorithm.adv_estimator=turn_gae"),
        ("agent_proxy.max_actions_per_turn=2", "may read several actions"),
    ],
)
def test_what_has_no_key_here_is_told_and_nothing_is_guessed(override: str, words: str) -> None:
    (problem,) = problems_of(override)
    assert words in problem and "Did you mean" not in problem


@pytest.mark.parametrize(
    "override",
    [
        f"{ACTOR}.state_masking=true",
        "actor_rollout_ref.agent.mask_observations=True",
        "actor_rollout_ref.agent.enable_agent=True",
        "do_search=true",
        "agent_proxy.context_window_mode=full",
        "algorithm.gigpo.enable_similarity=False",
        "agent_proxy.max_actions_per_turn=1",
    ],
)
def test_what_is_so_here_anyway_is_accepted(override: str) -> None:
    assert load(override) == PPOConfig()


def test_two_sizes_of_a_group_are_an_error() -> None:
    (problem,) = problems_of(f"{ROLLOUT}.n_agent=5", f"{ROLLOUT}.n=2")
    assert problem.endswith("are the same limit: give one")


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
