"""Training and generating with SGLang over HTTP.

A server of the tests' own holds a real tiny model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from setup import (
    ConfigStore,
    MultiTurnInferenceEngine,
    RayPPOTrainer,
    SimpleGameEnvironment,
    create_inference_engine,
)
from tests.e2e.test_training import read_steps, tiny_config, train
from tests.sglang_server import Model, serving
from tests.unit.test_rollout import model_spec
from training.building import build_trainer
from training.config.loader import ConfigError, load_config

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture
def game(tiny_game: Path) -> Iterator[tuple[Model, str]]:
    model = Model(model_spec(tiny_game / "model"), context=200)
    with serving(model) as url:
        yield model, url


def test_two_steps_train_with_a_server_that_sleeps_meanwhile(
    tiny_task: Path, tmp_path: Path
) -> None:
    model = Model(model_spec(tiny_task / "model"), context=64)
    with serving(model) as url:
        settings = [
            f"{ROLLOUT}.name=sglang",
            f"{ROLLOUT}.engine_kwargs.sglang.base_url={url}",
            f"{ROLLOUT}.n=2",
        ]
        config = tiny_config(tiny_task, tmp_path, *settings, "algorithm.adv_estimator=grpo")
        trainer = train(config)
    trained = trainer.actor_rollout_wg.worker.module.state_dict()
    for name, tensor in model.engine.module.state_dict().items():
        assert torch.equal(tensor, trained[name]), name
    _, *steps = read_steps(tmp_path)
    assert len(steps) == 2
    assert all(
        step["training/rollout_probs_diff_max"] < 1e-3 > step["canary/difference"] for step in steps
    )
    moved = [
        (verb.split("_")[0], body["tags"]) for verb, body in model.asked if "occupation" in verb
    ]
    once = [("release", ["kv_cache", "weights"]), ("resume", ["weights"]), ("resume", ["kv_cache"])]
    assert moved == once * (len(moved) // 3) and len(moved) >= 9


@pytest.mark.slow
def test_two_ranks_share_a_server_which_one_of_them_leads(tiny_task: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    model = Model(model_spec(tiny_task / "model"), context=64)
    with serving(model) as url:
        settings = [
            f"{ROLLOUT}.name=sglang",
            f"{ROLLOUT}.engine_kwargs.sglang.base_url={url}",
            f"{ROLLOUT}.n=2",
        ]
        settings += [
            "algorithm.adv_estimator=grpo",
            "trainer.n_gpus_per_node=2",
            "data.val_files=null",
        ]
        trainer = build_trainer(tiny_config(tiny_task, tmp_path, *settings))
        try:
            trainer.fit()
        finally:
            trainer.shutdown()
    moved = [verb for verb, _ in model.asked if "occupation" in verb]
    assert moved == ["release_memory_occupation", *["resume_memory_occupation"] * 2] * (
        len(moved) // 3
    )
    steps = read_steps(tmp_path)
    assert len(steps) == 2
    assert all(
        step["training/rollout_probs_diff_max"] < 1e-3 > step["canary/difference"] for step in steps
    )
    sent = [verb for verb, _ in model.asked if verb == "update_weights_from_tensor"]
    assert len(sent) == 3, "before the first step and after each, by one rank"


def test_several_turns_train_with_a_server(
    game: tuple[Model, str], tiny_game: Path, tmp_path: Path
) -> None:
    model, url = game
    store = ConfigStore()
    store.model.model_name, store.model.dtype = str(tiny_game / "model"), "float32"
    store.inference.backend, store.inference.max_tokens, store.inference.max_turns = "sglang", 6, 2
    store.inference.max_prompt_length = store.inference.max_response_length = 96
    store.training.batch_size = store.training.group_size = 2
    store.training.iterations_per_epoch, store.training.learning_rate = 1, 1e-3
    store.checkpoint.output_dir = str(tmp_path / "run")
    store.overrides[f"{ROLLOUT}.engine_kwargs"] = {"sglang": {"base_url": url}}
    with RayPPOTrainer(store, SimpleGameEnvironment()) as trainer:
        (epoch,) = trainer.fit()
        assert epoch["iterations"] == 1 and epoch["all"]["training/rollout_probs_diff_max"] < 1e-3
    assert len({body["rid"] for _, body in model.asked if "rid" in body}) > 4


def test_an_engine_by_itself_asks_a_server(game: tuple[Model, str], tiny_game: Path) -> None:
    model, url = game
    engine = create_inference_engine(
        str(tiny_game / "model"), "sglang", {"base_url": url, "max_model_len": 200}
    )
    output = engine.generate(["higher 5", "9 3"], max_tokens=6, temperature=0)
    local = create_inference_engine(
        str(tiny_game / "model"), "hf", {"dtype": "float32", "max_model_len": 200}
    )
    expected = local.generate(["higher 5", "9 3"], max_tokens=6, temperature=0)
    assert output.sequences == expected.sequences and output.token_ids == expected.token_ids
    summary = MultiTurnInferenceEngine(engine, max_turns=2).run_episode(
        SimpleGameEnvironment(), "Play.", max_tokens=6
    )
    assert len(list(summary)) == 2 and summary.ending == "max_turns"
    assert not model.released, "an engine by itself does not sleep"


def test_a_server_needs_no_package_and_counts_its_ranks_itself(tiny_task: Path) -> None:
    argv = [
        "configs/tiny_prompts.yaml",
        f"actor_rollout_ref.model.path={tiny_task}/model",
        f"{ROLLOUT}.name=sglang",
    ]
    argv += [
        f"data.train_files={tiny_task}/train.parquet",
        f"data.val_files={tiny_task}/val.parquet",
        "data.train_batch_size=64",
    ]
    server = f"{ROLLOUT}.engine_kwargs.sglang.base_url=http://127.0.0.1:30000"
    assert load_config([*argv, server]).config.actor_rollout_ref.rollout.name == "sglang"
    ranks = ["trainer.n_gpus_per_node=2", f"{ROLLOUT}.tensor_model_parallel_size=2"]
    with pytest.raises(ConfigError, match=r"rollout.name=sglang has one rank an engine; use 1"):
        load_config([*argv, server, *ranks])
