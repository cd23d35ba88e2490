"""The small Python API: every snippet of its guide, with a tiny model in the place of the names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import yaml
from omegaconf import OmegaConf

from custom.env_dataset import CustomEnvDataset
from custom.reward_manager import CustomRewardManager
from setup import (
    BaseEnvironment,
    BaseInferenceEngine,
    BatchInferenceManager,
    ConfigStore,
    CustomEnvironmentDataset,
    CustomRayPPOTrainer,
    EnvironmentConfig,
    EnvironmentRewardWrapper,
    EnvironmentStepTool,
    FunctionCallingParser,
    JSONActionParser,
    MultiTurnInferenceEngine,
    MultiTurnManager,
    RayPPOTrainer,
    ReActActionParser,
    SimpleGameEnvironment,
    Tool,
    ToolDefinition,
    ToolRegistry,
    Trajectory,
    algo,
    create_inference_engine,
    create_trainer,
)
from tests.conftest import PROJECT
from tests.e2e.test_docs import TINY
from training.agent_trainer import AgentTrainer
from training.building import build_trainer
from training.config import PPOConfig
from training.config.loader import ConfigError, load_config

BACKENDS = ["hf", pytest.param("vllm", marks=pytest.mark.vllm)]


class TextGameEnv(BaseEnvironment):
    def reset(self) -> str:
        self.score = 0.0
        self.inventory: list[str] = []
        return "Welcome to the game! You are in a room."

    def step(self, action: str) -> tuple:
        reward = 0.0
        if "take" in action.lower():
            self.inventory.append("item")
            reward = 1.0
        elif "attack" in action.lower():
            reward = 5.0
            self._done = True
        else:
            reward = -0.1
        self.score += reward
        return self.get_state_description(), reward, self._done, {}

    def get_state_description(self) -> str:
        return f"Score: {self.score}, Inventory: {self.inventory}"

    def get_prompt_prefix(self) -> str:
        return "You are a helpful assistant."


class Asked(BaseEnvironment):
    """A question of the dataset, answered in one word."""

    seen: ClassVar[list[str]] = []

    def reset(self, seed: int | None = None, question: str = "nothing", answer: str = "") -> str:
        type(self).seen.append(question)
        self.answer = answer
        return question

    def step(self, action: str) -> tuple:
        return "", float(len(action)), True, {}


class MyTool(Tool):
    definition = ToolDefinition(
        name="my_tool",
        description="Echoes.",
        parameters={
            "type": "object",
            "properties": {"param": {"type": "string"}},
            "required": ["param"],
        },
    )

    def execute(self, param: str) -> str:
        return param


def compute_reward(trajectory: Trajectory, environment: Any) -> float:
    return float(sum(len(action) for action in trajectory.actions))


@pytest.fixture
def config(tiny_game: Path, tmp_path: Path) -> ConfigStore:
    store = ConfigStore()
    store.model.model_name = str(tiny_game / "model")
    store.model.dtype = "float32"
    store.inference.backend = "hf"
    store.inference.max_tokens = 6
    store.inference.max_turns = 2
    store.inference.max_prompt_length = 96
    store.inference.max_response_length = 96
    store.training.batch_size = 2
    store.training.group_size = 2
    store.training.learning_rate = 1e-3
    store.training.iterations_per_epoch = 2
    store.checkpoint.output_dir = str(tmp_path / "run")
    return store


@pytest.fixture(scope="module")
def hf_engine(tiny_game: Path) -> BaseInferenceEngine:
    return create_inference_engine(
        str(tiny_game / "model"), "hf", {"dtype": "float32", "max_model_len": 200}
    )


# Configuration


def test_a_misspelt_field_names_the_nearest_and_a_new_store_needs_nothing() -> None:
    store = ConfigStore()
    with pytest.raises(AttributeError, match="learning_rate"):
        store.training.learning_rat = 1.0  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="training"):
        store.trainin = 1  # type: ignore[attr-defined]
    assert isinstance(store.to_omegaconf().trainer.total_epochs, int)
    with pytest.raises(ConfigError, match=r"config\.model\.model_name"):
        RayPPOTrainer(store, SimpleGameEnvironment()).fit()


def test_a_group_estimator_has_groups_by_itself() -> None:
    store = ConfigStore()
    samples = {}
    for name in ("grpo", "gae", "rloo", "remax"):
        store.training.adv_estimator = name
        samples[name] = store.settings()["actor_rollout_ref.rollout.n"]
    assert samples == {"grpo": 8, "gae": 1, "rloo": 8, "remax": 1}


def test_what_is_saved_runs_by_main_and_is_read_back(config: ConfigStore, tmp_path: Path) -> None:
    config.training.num_epochs = 1
    config.overrides["trainer.alarms"] = "off"
    RayPPOTrainer(config, SimpleGameEnvironment())
    config.save(tmp_path / "saved.yaml")
    read = ConfigStore.load(tmp_path / "saved.yaml")
    kept = read.settings()
    assert all(
        str(kept[key]) == str(value)
        for key, value in config.settings().items()
        if key != "trainer.logger"
    )
    flat = load_config([str(tmp_path / "saved.yaml")], check=False).config
    assert (
        flat.agent.environment.cls == "SimpleGameEnvironment"
        and flat.trainer.total_training_steps == 2
    )
    assert load_config([str(tmp_path / "saved.yaml")]).config == flat
    again = ConfigStore.of(flat)
    again.save(tmp_path / "again.yaml")
    assert yaml.safe_load((tmp_path / "again.yaml").read_text()) == yaml.safe_load(
        (tmp_path / "saved.yaml").read_text()
    )
    command = [sys.executable, str(PROJECT / "main.py"), str(tmp_path / "saved.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/global_step_2").is_dir()


def test_what_has_no_import_path_is_named_and_refused(config: ConfigStore, tmp_path: Path) -> None:
    class Local(SimpleGameEnvironment):
        pass

    RayPPOTrainer(config, Local(), reward_fn=lambda trajectory: 1.0)
    config.save(tmp_path / "saved.yaml")
    first, second, *_ = (tmp_path / "saved.yaml").read_text().splitlines()
    assert "environment has no import path" in first and "Local" in first and "reward_fn" in second
    with pytest.raises(ConfigError, match=r"agent.environment.name=given stands for an object"):
        load_config([str(tmp_path / "saved.yaml")])


def test_trainers_take_an_omegaconf_and_a_mapping(config: ConfigStore, tiny_game: Path) -> None:
    spelt = config.to_omegaconf()
    spec = {"agent_cls": lambda: None}
    trainers = [build_trainer(spelt, **spec), build_trainer(OmegaConf.to_container(spelt), **spec)]
    trainers.append(AgentTrainer(spelt, trainers[0].tokenizer, **spec))
    assert all(isinstance(trainer, AgentTrainer) for trainer in trainers)
    assert all(isinstance(trainer.config, PPOConfig) for trainer in trainers)
    assert trainers[0].config == trainers[1].config == trainers[2].config
    with pytest.raises(ConfigError, match="learning_rate"):
        build_trainer({"actor_rollout_ref": {"actor": {"optim": {"learning_rate": 1}}}}, **spec)


# Training


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_trains_on_an_environment(config: ConfigStore, backend: str, tmp_path: Path) -> None:
    config.inference.backend = backend
    env = TextGameEnv(config.environment)
    observation, reward, done, _ = env.reset(), *env.step("take")[1:]
    assert (observation, reward, done) == ("Welcome to the game! You are in a room.", 1.0, False)
    trainer = RayPPOTrainer(config=config, environment=env, reward_fn=compute_reward, dataset=None)
    trainer.fit(num_epochs=2)
    assert [m["epoch"] for m in trainer.metrics_history] == [1, 2]
    assert all(np.isfinite(m["policy_loss"]) and m["reward"] > 0 for m in trainer.metrics_history)
    trainer.save_checkpoint(tmp_path / "epoch_2")
    before = weights(trainer)
    trainer.fit(num_epochs=1, num_iters_per_epoch=3)
    assert (
        trainer.core is not None
        and trainer.core.global_steps == 7
        and trainer.metrics_history[-1]["iterations"] == 3
    )
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    trainer.load_checkpoint(tmp_path / "epoch_2")
    assert trainer.core.global_steps == 4
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    trainer.cleanup()


def weights(trainer: RayPPOTrainer) -> list[torch.Tensor]:
    assert trainer.core is not None
    return [p.detach().clone() for p in trainer.core.actor_rollout_wg.worker.module.parameters()]


def test_a_loop_of_ones_own_does_what_fit_does(config: ConfigStore) -> None:
    config.overrides |= {"trainer.deterministic": True, "trainer.resume_mode": "disable"}
    with RayPPOTrainer(config, TextGameEnv(), reward_fn=compute_reward) as fitted:
        fitted.fit(num_epochs=1)
        expected = weights(fitted)
    with RayPPOTrainer(config, TextGameEnv(), reward_fn=compute_reward) as looped:
        for _ in range(2):
            rollout = looped.rollout()
            metrics = looped.train_step(rollout)
        assert all(torch.equal(a, b) for a, b in zip(expected, weights(looped), strict=True))
    assert len(rollout) == 4 and metrics["agent/episodes"] == 4
    for texts, tokens, masks, log_probs, rewards in zip(
        rollout.texts,
        rollout.tokens,
        rollout.masks,
        rollout.log_probs,
        rollout.rewards,
        strict=True,
    ):
        assert len(texts) == 2 and [len(turn) for turn in tokens] == [len(turn) for turn in masks]
        assert all(mask[0] == 1 and lp[0] < 0 for mask, lp in zip(masks, log_probs, strict=True))
        assert 0 in masks[0] and rewards[0] == 0
    paid = [sum(rewards) for rewards in rollout.rewards]
    assert paid == [sum(len(text) for text in texts) for texts in rollout.texts]
    assert [len(trajectory.states) for trajectory in rollout.trajectories] == [3] * 4


def test_a_rollout_is_trained_on_as_often_as_one_likes_and_stays_as_it_was(
    config: ConfigStore,
) -> None:
    config.overrides["actor_rollout_ref.actor.ppo_epochs"] = 2
    with RayPPOTrainer(config, TextGameEnv()) as trainer:
        rollout = trainer.rollout()
        before = set(rollout.batch.batch.keys())
        assert all(np.isfinite(trainer.train_step(rollout)["actor/pg_loss"]) for _ in range(2))
        assert set(rollout.batch.batch.keys()) == before


def test_a_checkpoint_takes_the_place_of_a_checkpoint_only(
    config: ConfigStore, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    with RayPPOTrainer(config, TextGameEnv()) as trainer:
        trainer.fit(1, 1)
        for folder in (tmp_path / "mine", Path(config.checkpoint.output_dir)):
            held = sorted(path.name for path in folder.iterdir())
            with pytest.raises(ValueError, match="holds what is no checkpoint"):
                trainer.save_checkpoint(folder)
            assert sorted(path.name for path in folder.iterdir()) == held
        for _ in range(2):
            assert (trainer.save_checkpoint(tmp_path / "last") / "data.pt").exists()


def test_a_loaded_config_still_follows_its_fields_and_a_loop_goes_on_from_the_runs_checkpoint(
    config: ConfigStore, tmp_path: Path
) -> None:
    config.save(tmp_path / "run.yaml")
    loaded = ConfigStore.load(tmp_path / "run.yaml")
    loaded.training.group_size, loaded.inference.max_response_length = 3, 70
    loaded.overrides["trainer.resume_mode"] = "auto"
    made = loaded.settings()
    assert (made["actor_rollout_ref.rollout.n"], made["data.max_response_length"]) == (3, 70)
    with RayPPOTrainer(loaded, TextGameEnv()) as trainer:
        trainer.fit(num_epochs=3, num_iters_per_epoch=1)
        assert [entry["epoch"] for entry in trainer.metrics_history] == [1, 2, 3]
        with pytest.raises(TypeError, match="training is a section"):
            trainer.config.training = {"batch_size": 4}  # type: ignore[assignment]
    with RayPPOTrainer(loaded, TextGameEnv()) as trainer:
        assert trainer.train_step(trainer.rollout())["training/global_step"] == 4


def test_a_dataset_is_rows_and_no_name_of_a_file(config: ConfigStore) -> None:
    with (
        pytest.raises(ValueError, match="is no rows"),
        RayPPOTrainer(config, None, len, "data.json") as t,
    ):
        t.rollout()


def test_a_datasets_rows_are_the_environments_tasks(config: ConfigStore) -> None:
    Asked.seen = []
    rows = [{"question": f"question {i}", "answer": str(i)} for i in range(4)]
    with RayPPOTrainer(config, Asked(), dataset=rows) as trainer:
        trainer.fit(num_epochs=1)
        assert trainer.core is not None and trainer.core.global_steps == 2
    asked = [text for text in Asked.seen if text.startswith("question")]
    assert {asked.count(row["question"]) >= 2 for row in rows} == {True} and "nothing" not in asked
    with pytest.raises(ConfigError, match="reset takes none of colour"):
        RayPPOTrainer(config, Asked(), dataset=[{"colour": "red"}] * 2).fit()


@pytest.mark.parametrize(
    "reward_fn", [lambda trajectory: len(trajectory.actions[0]), EnvironmentRewardWrapper(Asked())]
)
def test_it_trains_on_prompts(config: ConfigStore, reward_fn: Any) -> None:
    with RayPPOTrainer(
        config, reward_fn=reward_fn, dataset=["3 5", "4 7", "1 2", "8 9"]
    ) as trainer:
        trainer.fit()
        assert (
            trainer.metrics_history[0]["iterations"] == 2
            and trainer.metrics_history[0]["reward"] > 0
        )


def test_one_trainer_by_three_names_with_an_engines_tools(
    config: ConfigStore, hf_engine: BaseInferenceEngine, tiny_game: Path
) -> None:
    manager = MultiTurnManager(ToolRegistry([MyTool()]), JSONActionParser())
    lender = MultiTurnInferenceEngine(
        hf_engine, max_turns=1, system_prompt="higher", tool_manager=manager
    )
    config.overrides["agent.trial_episodes"] = 0
    given = hf_engine.tokenizer, lender
    trainer = CustomRayPPOTrainer(config, SimpleGameEnvironment(), compute_reward, *given)
    with trainer:
        rollout = trainer.rollout()
        assert trainer.core is not None
        (agent,) = [spec.build() for spec in trainer.core.specs]  # type: ignore[attr-defined]
        assert agent.tools is not None and agent.tools.schemas()[0]["function"]["name"] == "my_tool"
        assert agent.tools.tools["my_tool"] is not manager.registry.tools["my_tool"]
        assert {len(turns) for turns in rollout.texts} == {1}
        assert all(turns[0].observation.count("higher") for turns in rollout.episodes)
    made = create_trainer(
        config=config, environment=SimpleGameEnvironment(), tokenizer=hf_engine.tokenizer
    )
    assert isinstance(made, CustomRayPPOTrainer) and made.tokenizer is hf_engine.tokenizer
    by_manager = RayPPOTrainer(config, SimpleGameEnvironment(), tool_manager=manager)
    assert by_manager.agent_spec.tools == tuple(manager.registry.tools.values())
    assert by_manager.agent_spec.parser is manager.parser


def test_a_mistake_in_a_users_code_comes_with_file_and_line(config: ConfigStore) -> None:
    class ThreeValues(SimpleGameEnvironment):
        def step(self, action: str) -> Any:
            return "", 1.0, True

    with pytest.raises(ConfigError, match=r"ThreeValues.step \(.*test_setup.py:\d+\) returned"):
        RayPPOTrainer(config, ThreeValues()).fit()
    with pytest.raises(
        ConfigError, match=r"reward_fn \(.*test_setup.py:\d+\) returned the reward 'ten'"
    ):
        RayPPOTrainer(config, SimpleGameEnvironment(), reward_fn=lambda trajectory: "ten").fit()

    class NoSchema(Tool):
        def execute(self) -> str:
            return ""

    with pytest.raises(ValueError, match=r"NoSchema.*definition"):
        ToolRegistry([NoSchema()])


# Algorithms


def test_the_algorithms_are_the_trainers() -> None:
    torch.manual_seed(0)
    rewards, values, old, new, ref = torch.randn(5, 4, 6).unbind()
    mask = torch.ones(4, 6)
    advantages, returns = algo.compute_gae_advantage_return(
        token_level_rewards=rewards, values=values, response_mask=mask, gamma=0.99, lam=0.95
    )
    assert advantages.shape == returns.shape == (4, 6) and abs(float(advantages.mean())) < 1e-6
    grouped, _ = algo.compute_grpo_advantage(
        token_level_rewards=rewards, response_mask=mask, index=np.array([0, 0, 1, 1])
    )
    assert float(grouped[0, 0] + grouped[1, 0]) == pytest.approx(0, abs=1e-6)
    loss, metrics = algo.compute_policy_loss(
        old_log_probs=old, log_probs=new, advantages=advantages, response_mask=mask, clip_ratio=0.2
    )
    assert float(loss) == float(
        algo.compute_ppo_loss(old, new, advantages, mask, {"clip_ratio": 0.2})
    )
    assert 0 < metrics["pg_clipfrac"] < 1
    value_loss, metrics = algo.compute_value_loss(
        vpreds=values, returns=returns, old_values=values, response_mask=mask, cliprange_value=0.2
    )
    assert (
        float(value_loss) == pytest.approx(float(((values - returns) ** 2).mean() / 2))
        and metrics["vf_clipfrac"] == 0
    )
    penalised, kl = algo.apply_kl_penalty(
        token_level_rewards=rewards,
        log_probs=new,
        ref_log_probs=ref,
        response_mask=mask,
        kl_coef=0.01,
    )
    assert torch.allclose(penalised, rewards - 0.01 * (new - ref)) and kl == pytest.approx(
        float((new - ref).mean())
    )
    controller = algo.KLController(init_kl_coef=0.01, target_kl=0.01, adaptive=True)
    controller.update(current_kl=0.015, n_steps=1024)
    assert controller.value == pytest.approx(0.01 * (1 + 0.2 * 1024 / 10_000))
    assert algo.estimate_advantages(rewards, values, torch.zeros(4, 6), 0.9, 0.8)[0].shape == (4, 6)
    assert torch.equal(algo.compute_kl_penalty(new, ref), new - ref)


# Inference


@pytest.fixture(scope="module")
def engines(tiny_game: Path) -> Iterator[dict[str, BaseInferenceEngine]]:
    yield {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_generates(
    tiny_game: Path, backend: str, engines: dict[str, BaseInferenceEngine]
) -> None:
    engine = create_inference_engine(
        model_path=str(tiny_game / "model"),
        backend=backend,
        config={
            "dtype": "float32",
            "tensor_parallel_size": 1,
            "max_model_len": 200,
            "max_num_seqs": 8,
        },
    )
    output = engine.generate(prompts=["higher 5"], max_tokens=6, temperature=0.7, top_p=0.9)
    assert isinstance(output.sequences[0], str) and output.tokens.shape == (
        1,
        len(output.token_ids[0]),
    )
    assert (
        len(output.log_probs[0]) == len(output.token_ids[0]) <= 6 and max(output.log_probs[0]) <= 0
    )
    assert len(engine.generate(["test prompt"]).sequences) == 1
    told = engine.generate([{"role": "user", "content": "higher 5"}], 6, seed=3)
    assert told.token_ids == engine.generate("higher 5", 6, seed=3).token_ids
    assert engine.encode("higher 5", raw=True) == engine.tokenizer.encode("higher 5")
    assert engine.encode("higher 5")[-3:] != engine.encode("higher 5", raw=True)[-3:]
    many = BatchInferenceManager(engine, batch_size=4).generate_batch(
        [f"{i} 3" for i in range(10)], max_tokens=5, seed=1
    )
    assert len(many.sequences) == len(many.tokens) == 10
    greedy = [engine.generate(text, 5, temperature=0).token_ids[0] for text in ("1 3", "9 3")]
    batch = BatchInferenceManager(engine, batch_size=1).generate_batch(
        ["1 3", "9 3"], max_tokens=5, temperature=0
    )
    assert batch.token_ids == greedy
    with pytest.raises(ValueError, match=r"prompt 0 has .* max_model_len=200"):
        engine.generate("higher " * 300)
    multi_turn = MultiTurnInferenceEngine(
        engine=engine, max_turns=5, system_prompt="You are a helpful assistant."
    )
    env = SimpleGameEnvironment()
    responses = multi_turn.run_episode(
        env, initial_prompt="Start playing the game.", max_turns=3, max_tokens=6
    )
    assert 1 <= len(list(responses)) <= 3 and responses.total_reward == pytest.approx(env.score)
    assert responses.ending in ("max_turns", "done")
    assert multi_turn.messages[1]["content"].startswith(
        "Start playing the game.\n\nYou are in a room."
    )


def test_an_unknown_backend_and_a_missing_package_are_named(
    tiny_game: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="backend='tgi' is unknown; allowed: hf, sglang, vllm"):
        create_inference_engine(str(tiny_game / "model"), "tgi")
    for backend in ("vllm", "sglang"):
        monkeypatch.setitem(sys.modules, backend, None)
        with pytest.raises(ImportError, match=f"pip install .?{backend}"):
            create_inference_engine(str(tiny_game / "model"), backend, {"max_model_len": 64})


def test_a_conversation(hf_engine: BaseInferenceEngine) -> None:
    multi_turn = MultiTurnInferenceEngine(
        engine=hf_engine, max_turns=5, system_prompt="You are a helpful assistant."
    )
    with pytest.raises(ValueError, match="start_conversation"):
        multi_turn.step()
    multi_turn.start_conversation("Initial prompt")
    response = multi_turn.step(max_tokens=6)
    multi_turn.add_message("and now?")
    assert [message["role"] for message in multi_turn.messages] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    said = multi_turn.format_conversation()
    assert (
        "Initial prompt" in said
        and response in said
        and said.index("and now?") > said.index("Initial prompt")
    )


# Tools


def test_an_engine_refuses_what_it_cannot_do_and_leaves_environments_open(
    hf_engine: BaseInferenceEngine, tiny_game: Path
) -> None:
    for wrong in ({"temperature": -1.0}, {"top_p": 2.0}, {"max_tokens": 0}, {"temperatur": 1.0}):
        with pytest.raises(ValueError, match="temperature"):
            hf_engine.generate("higher", **wrong)
    with pytest.raises(ValueError, match="max_model_length"):
        create_inference_engine(str(tiny_game / "model"), "hf", {"max_model_length": 100})
    hf_engine.rollout.submit(
        "0", [1, 2, 3], hf_engine.sampling(4)
    )  # left by a call that was interrupted
    alone = hf_engine.generate("higher", max_tokens=4, temperature=0).token_ids
    assert alone == hf_engine.generate(["higher"], max_tokens=4, temperature=0).token_ids

    class Closing(TextGameEnv):
        open = True

        def close(self) -> None:
            self.open = False

    env = Closing()
    for _ in range(2):
        MultiTurnInferenceEngine(hf_engine, max_turns=2).run_episode(env, max_tokens=4)
    assert env.open


def test_tools_by_hand_and_in_an_episode(hf_engine: BaseInferenceEngine) -> None:
    env = SimpleGameEnvironment()
    registry = ToolRegistry()
    registry.register(MyTool())
    registry.register(EnvironmentStepTool(env))
    assert registry.execute_tool("my_tool", param="value") == (True, "value")
    success, result = registry.execute_tool("my_tool", colour="red")
    assert not success and "param" in result
    for parser, text in {
        JSONActionParser(): 'I call {"name": "my_tool", "arguments": {"param": "x"}}',
        ReActActionParser(): 'Thought: now\nAction: my_tool\nAction Input: {"param": "x"}',
        FunctionCallingParser(): '<tool_call>{"name": "my_tool", "arguments": {"param": "x"}}</tool_call>',
    }.items():
        manager = MultiTurnManager(registry, parser, env)
        assert manager.step(text, env.reset()).tool_call.result == "x"
        assert "no tool call" in manager.step("model output", env.reset()).tool_call.result
        summary = manager.summary()
        assert list(summary) == [text, "model output"]
        assert summary.tool_statistics["my_tool"]["calls"] == 1
    multi_turn = MultiTurnInferenceEngine(hf_engine, tool_manager=manager, enable_tools=True)
    summary = multi_turn.run_episode(env, "Play.", max_turns=2, max_tokens=6)
    own = manager.summary()
    assert (list(summary), summary.tool_statistics) == (list(own), own.tool_statistics)
    assert summary.total_reward == pytest.approx(own.total_reward)


# One's own parts


def test_ones_own_parts_before_training(hf_engine: BaseInferenceEngine) -> None:
    env = SimpleGameEnvironment(EnvironmentConfig())
    env.reset()
    assert len(env.step("test action")) == 4
    dataset = CustomEnvDataset(env)
    assert len(dataset) and dataset[0]["prompt"] and callable(CustomRewardManager(env))
    rows = CustomEnvironmentDataset(env, hf_engine.tokenizer)
    assert {"input_ids", "attention_mask"} <= rows[0].keys()


def test_the_package_is_importable_from_any_folder(tmp_path: Path) -> None:
    """After `pip install -e .`, here by uv, with the dependencies of this environment."""
    bin = Path(sys.executable).parent
    uv, venv = bin / "uv", tmp_path / "venv"
    if not uv.exists():
        pytest.skip("uv is not installed")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, venv], check=True)
    install = [
        uv,
        "pip",
        "install",
        "--quiet",
        "--python",
        venv / "bin/python",
        "--no-deps",
        "-e",
        PROJECT,
    ]
    subprocess.run(install, check=True)
    found = "import setup, training, workers, data, custom; print(setup.__file__)"
    paths = {"PYTHONPATH": sysconfig.get_paths()["purelib"]}
    done = subprocess.run(
        [venv / "bin/python", "-c", found], cwd=tmp_path, env=paths, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(PROJECT / "setup/__init__.py"), done.stderr


BLOCKS = re.findall(r"```python\n(.*?)```", (PROJECT / "docs/python.md").read_text(), re.S)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_script_of_the_guide_runs_as_it_stands(
    number: int, tiny_game: Path, tmp_path: Path
) -> None:
    model = str(tiny_game / "model")
    source = BLOCKS[number].replace("outputs/quickstart/task/model", model)
    source = source.replace(
        '"configs/quickstart.yaml", ',
        f'"configs/quickstart.yaml", {of_model(tiny_game, tmp_path)}, ',
    )
    (tmp_path / "script.py").write_text(source)
    paths = {**os.environ, "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(
        command, cwd=tmp_path, env=paths, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def of_model(game: Path, folder: Path) -> str:
    """Writes the overrides that make the quickstart's config small, as items of a list."""
    own = [
        f"actor_rollout_ref.model.path={game / 'model'}",
        f"trainer.default_local_dir={folder / 'run'}",
        *TINY,
    ]
    return ", ".join(map(repr, own))
