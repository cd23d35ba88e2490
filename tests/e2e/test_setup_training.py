"""The small API's trainer: environments, datasets, loops of one's own, checkpoints, tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from setup import (
    BaseEnvironment,
    ConfigStore,
    CustomRayPPOTrainer,
    EnvironmentRewardWrapper,
    JSONActionParser,
    MultiTurnInferenceEngine,
    MultiTurnManager,
    RayPPOTrainer,
    SimpleGameEnvironment,
    Tool,
    ToolRegistry,
    create_trainer,
)
from tests.e2e.setup_parts import (
    BACKENDS,
    MyTool,
    TextGameEnv,
    compute_reward,
    make_config,
    make_hf_engine,
)
from training.config.loader import ConfigError


class Asked(BaseEnvironment):
    """A question of the dataset, answered in one word."""

    seen: ClassVar[list[str]] = []

    def reset(self, seed: int | None = None, question: str = "nothing", answer: str = "") -> str:
        type(self).seen.append(question)
        self.answer = answer
        return question

    def step(self, action: str) -> tuple:
        return "", float(len(action)), True, {}


@pytest.fixture
def config(tiny_game: Path, tmp_path: Path) -> ConfigStore:
    return make_config(tiny_game, tmp_path)


def weights(trainer: RayPPOTrainer) -> list[torch.Tensor]:
    assert trainer.core is not None
    module = trainer.core.actor_rollout_wg.worker.module
    return [parameter.detach().clone() for parameter in module.parameters()]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_trains_on_an_environment(config: ConfigStore, backend: str, tmp_path: Path) -> None:
    config.inference.backend = backend
    env = TextGameEnv(config.environment)
    assert env.reset() == "Welcome to the game! You are in a room."
    _, reward, done, _ = env.step("take")
    assert (reward, done) == (1.0, False)

    trainer = RayPPOTrainer(config=config, environment=env, reward_fn=compute_reward, dataset=None)
    trainer.fit(num_epochs=2)
    assert [entry["epoch"] for entry in trainer.metrics_history] == [1, 2]
    for entry in trainer.metrics_history:
        assert np.isfinite(entry["policy_loss"])
        assert entry["reward"] > 0

    trainer.save_checkpoint(tmp_path / "epoch_2")
    before = weights(trainer)
    trainer.fit(num_epochs=1, num_iters_per_epoch=3)
    assert trainer.core is not None
    assert trainer.core.global_steps == 7
    assert trainer.metrics_history[-1]["iterations"] == 3
    assert not equal(before, weights(trainer))

    trainer.load_checkpoint(tmp_path / "epoch_2")
    assert trainer.core.global_steps == 4
    assert equal(before, weights(trainer))
    trainer.cleanup()


def test_a_loop_of_ones_own_does_what_fit_does(config: ConfigStore) -> None:
    config.overrides |= {"trainer.deterministic": True, "trainer.resume_mode": "disable"}
    with RayPPOTrainer(config, TextGameEnv(), reward_fn=compute_reward) as fitted:
        fitted.fit(num_epochs=1)
        expected = weights(fitted)
    with RayPPOTrainer(config, TextGameEnv(), reward_fn=compute_reward) as looped:
        for _ in range(2):
            rollout = looped.rollout()
            metrics = looped.train_step(rollout)
        assert equal(expected, weights(looped))
    assert len(rollout) == 4
    assert metrics["agent/episodes"] == 4
    for episode in range(4):
        masks = rollout.masks[episode]
        assert len(rollout.texts[episode]) == 2
        lengths = [len(ids) for ids in rollout.tokens[episode]]
        assert lengths == [len(mask) for mask in masks]
        assert all(mask[0] == 1 for mask in masks)
        assert all(log_probs[0] < 0 for log_probs in rollout.log_probs[episode])
        assert 0 in masks[0]
        assert rollout.rewards[episode][0] == 0
        written = sum(len(text) for text in rollout.texts[episode])
        assert sum(rollout.rewards[episode]) == written
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
            contents = sorted(path.name for path in folder.iterdir())
            with pytest.raises(ValueError, match="holds what is no checkpoint"):
                trainer.save_checkpoint(folder)
            assert sorted(path.name for path in folder.iterdir()) == contents
        for _ in range(2):
            assert (trainer.save_checkpoint(tmp_path / "last") / "data.pt").exists()


def test_a_loaded_config_still_follows_its_fields_and_a_loop_goes_on_from_the_runs_checkpoint(
    config: ConfigStore, tmp_path: Path
) -> None:
    config.save(tmp_path / "run.yaml")
    loaded = ConfigStore.load(tmp_path / "run.yaml")
    loaded.training.group_size = 3
    loaded.inference.max_response_length = 70
    loaded.overrides["trainer.resume_mode"] = "auto"
    settings = loaded.settings()
    assert settings["actor_rollout_ref.rollout.n"] == 3
    assert settings["data.max_response_length"] == 70
    with RayPPOTrainer(loaded, TextGameEnv()) as trainer:
        trainer.fit(num_epochs=3, num_iters_per_epoch=1)
        assert [entry["epoch"] for entry in trainer.metrics_history] == [1, 2, 3]
        with pytest.raises(TypeError, match="training is a section"):
            trainer.config.training = {"batch_size": 4}  # type: ignore[assignment]
    with RayPPOTrainer(loaded, TextGameEnv()) as trainer:
        assert trainer.train_step(trainer.rollout())["training/global_step"] == 4


def test_a_cell_that_is_run_again_goes_on_or_says_why_not_and_has_the_whole_history(
    config: ConfigStore, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = RayPPOTrainer(config, TextGameEnv())
    history = trainer.fit(num_epochs=2)
    again = RayPPOTrainer(config, TextGameEnv())
    assert again.fit(num_epochs=2) == history
    assert trainer.core is None
    assert "an earlier trainer of this process held" in caplog.text
    assert "has made its 2 epochs already: fit(num_epochs=4) goes on" in caplog.text
    with RayPPOTrainer(config, TextGameEnv()) as more:
        longer = more.fit(num_epochs=3)
    assert longer[:2] == history and [entry["epoch"] for entry in longer] == [1, 2, 3]


def test_a_dataset_is_rows_and_no_name_of_a_file(config: ConfigStore) -> None:
    with (
        RayPPOTrainer(config, None, len, "data.json") as trainer,
        pytest.raises(ValueError, match="is no rows"),
    ):
        trainer.rollout()


def test_a_datasets_rows_are_the_environments_tasks(config: ConfigStore) -> None:
    Asked.seen = []
    rows = [{"question": f"question {i}", "answer": str(i)} for i in range(4)]
    with RayPPOTrainer(config, Asked(), dataset=rows) as trainer:
        trainer.fit(num_epochs=1)
        assert trainer.core is not None
        assert trainer.core.global_steps == 2
    asked = [text for text in Asked.seen if text.startswith("question")]
    assert all(asked.count(row["question"]) >= 2 for row in rows)
    with pytest.raises(ConfigError, match="reset takes none of colour"):
        RayPPOTrainer(config, Asked(), dataset=[{"colour": "red"}] * 2).fit()


@pytest.mark.parametrize(
    "reward_fn", [lambda trajectory: len(trajectory.actions[0]), EnvironmentRewardWrapper(Asked())]
)
def test_it_trains_on_prompts(config: ConfigStore, reward_fn: Any) -> None:
    prompts = ["3 5", "4 7", "1 2", "8 9"]
    with RayPPOTrainer(config, reward_fn=reward_fn, dataset=prompts) as trainer:
        trainer.fit()
        assert trainer.metrics_history[0]["iterations"] == 2
        assert trainer.metrics_history[0]["reward"] > 0


def test_multi_turn_false_plays_one_turn_and_true_needs_an_environment(
    config: ConfigStore,
) -> None:
    turns = {}
    for multi_turn in (False, None, True):
        config.inference.multi_turn = multi_turn
        with RayPPOTrainer(config, TextGameEnv(), compute_reward) as trainer:
            turns[multi_turn] = {len(texts) for texts in trainer.rollout().texts}
    assert turns == {False: {1}, None: {2}, True: {2}}
    with pytest.raises(ConfigError, match=r"config\.inference\.multi_turn=True has nothing"):
        RayPPOTrainer(config, reward_fn=compute_reward, dataset=["3 5", "4 7"]).fit()


def test_one_trainer_by_three_names_with_an_engines_tools(
    config: ConfigStore, tiny_game: Path
) -> None:
    engine = make_hf_engine(tiny_game)
    tokenizer = engine.tokenizer
    manager = MultiTurnManager(ToolRegistry([MyTool()]), JSONActionParser())
    lender = MultiTurnInferenceEngine(
        engine, max_turns=1, system_prompt="higher", tool_manager=manager
    )
    config.overrides["agent.trial_episodes"] = 0
    env = SimpleGameEnvironment()
    with CustomRayPPOTrainer(config, env, compute_reward, tokenizer, lender) as trainer:
        rollout = trainer.rollout()
        assert trainer.core is not None
        (spec,) = trainer.core.specs  # type: ignore[attr-defined]
        tools = spec.build().tools
        assert tools is not None
        assert tools.schemas()[0]["function"]["name"] == "my_tool"
        assert tools.tools["my_tool"] is not manager.registry.tools["my_tool"]
        assert {len(turns) for turns in rollout.texts} == {1}
        assert all("higher" in turns[0].observation for turns in rollout.episodes)

    made = create_trainer(config=config, environment=SimpleGameEnvironment(), tokenizer=tokenizer)
    assert isinstance(made, CustomRayPPOTrainer)
    assert made.tokenizer is tokenizer
    by_manager = RayPPOTrainer(config, SimpleGameEnvironment(), tool_manager=manager)
    assert by_manager.agent_spec.tools == tuple(manager.registry.tools.values())
    assert by_manager.agent_spec.parser is manager.parser


def test_a_mistake_in_a_users_code_comes_with_file_and_line(config: ConfigStore) -> None:
    class ThreeValues(SimpleGameEnvironment):
        def step(self, action: str) -> Any:
            return "", 1.0, True

    place = r"\(.*test_setup_training.py:\d+\)"
    with pytest.raises(ConfigError, match=rf"ThreeValues.step {place} returned"):
        RayPPOTrainer(config, ThreeValues()).fit()
    with pytest.raises(ConfigError, match=rf"reward_fn {place} returned the reward 'ten'"):
        RayPPOTrainer(config, SimpleGameEnvironment(), reward_fn=lambda trajectory: "ten").fit()

    class NoSchema(Tool):
        def execute(self) -> str:
            return ""

    with pytest.raises(ValueError, match=r"NoSchema.*definition"):
        ToolRegistry([NoSchema()])
