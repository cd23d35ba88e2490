"""Two steps of the real trainer for every estimator and engine, and what a run leaves behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.cases import fast_and_long
from tests.needed_features import absent_folders
from training.building import build_trainer
from training.config import PPOConfig
from training.config.loader import load_config
from training.ray_trainer import RayPPOTrainer

# Without the folder that writes metrics.jsonl its runs train all the same.
FILE_LOGGER = "[]" if absent_folders("trackers") else "file"
ENGINES = ["hf", pytest.param("vllm", marks=pytest.mark.vllm)]
ESTIMATORS = {
    "gae": {"ppo_epochs": 2, "use_kl_in_reward": False, "n": 1},
    "grpo": {"ppo_epochs": 1, "use_kl_in_reward": False, "n": 4},
    "rloo": {"ppo_epochs": 1, "use_kl_in_reward": True, "n": 4},
    "reinforce_plus_plus": {"ppo_epochs": 2, "use_kl_in_reward": True, "n": 2},
}


def tiny_config(task: Path, run_dir: Path, *overrides: str) -> PPOConfig:
    """The quickstart's config on the session's tiny task: 8 prompts a step, two steps."""
    return load_config(tiny_argv(task, run_dir, *overrides)).config


def tiny_argv(task: Path, run_dir: Path, *overrides: str) -> list[str]:
    """That config's command line."""
    return [
        "configs/tiny_prompts.yaml",
        f"data.train_files={task}/train.parquet",
        f"data.val_files={task}/val.parquet",
        f"actor_rollout_ref.model.path={task}/model",
        f"trainer.default_local_dir={run_dir}",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.max_num_seqs=32",
        "trainer.total_training_steps=2",
        f"trainer.logger={FILE_LOGGER}",
        *overrides,
    ]


def train(config: PPOConfig) -> RayPPOTrainer:
    trainer = build_trainer(config)
    trainer.init_workers()
    trainer.fit()
    return trainer


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("estimator", fast_and_long(ESTIMATORS, fast=["gae", "grpo"]))
def test_two_steps_change_the_weights_and_log_every_phase(
    tiny_task, tmp_path, estimator, engine
) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm")
    settings = ESTIMATORS[estimator]
    config = tiny_config(
        tiny_task,
        tmp_path,
        f"algorithm.adv_estimator={estimator}",
        f"algorithm.use_kl_in_reward={settings['use_kl_in_reward']}",
        f"actor_rollout_ref.actor.ppo_epochs={settings['ppo_epochs']}",
        f"actor_rollout_ref.actor.use_kl_loss={estimator == 'grpo'}",
        f"actor_rollout_ref.rollout.n={settings['n']}",
        f"actor_rollout_ref.rollout.name={engine}",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
    )
    trainer = train(config)
    before = AutoModelForCausalLM.from_pretrained(tiny_task / "model").state_dict()
    after = trainer.actor_rollout_wg.worker.module.state_dict()
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    assert sum(not torch.equal(before[name], after[name]) for name in before) >= len(before) - 1

    steps = read_steps(tmp_path)
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert "val-core/guess_the_number/reward/mean@1" in steps[0]
    assert "val-core/guess_the_number/reward/mean@1" in steps[2]
    for step in steps[1:]:
        assert step["training/rollout_probs_diff_max"] < 1e-4, "fp32 engine and trainer agree"
        assert step["actor/grad_norm"] > 0
        assert step["actor/skipped_updates"] == 0
        assert {
            "actor/pg_loss",
            "actor/entropy",
            "actor/lr",
            "critic/score/mean",
            "timing_s/gen",
        } <= step.keys()
        assert ("critic/vf_loss" in step) == (estimator == "gae")
        assert ("actor/kl_loss" in step) == (estimator == "grpo")
        assert ("actor/reward_kl_penalty" in step) == settings["use_kl_in_reward"]
    if settings["use_kl_in_reward"]:
        assert abs(steps[1]["actor/reward_kl_penalty"]) < 1e-6, (
            "before the first update policy and reference are one"
        )


# pad token -> its id: a token of its own, the one that ends turns, one that may be sampled
PADS = {"<pad>": 0, "<|im_end|>": 2, "<unk>": 3}


def model_that_pads_with(task: Path, folder: Path, pad: str) -> Path:
    """Copies the tiny model, with another padding token in its configs."""
    model = folder / "model"
    shutil.copytree(task / "model", model)
    for name, value in (("tokenizer_config.json", pad), ("config.json", PADS[pad])):
        content = json.loads((model / name).read_text())
        key = "pad_token" if name == "tokenizer_config.json" else "pad_token_id"
        (model / name).write_text(json.dumps({**content, key: value}))
    return model


@pytest.mark.parametrize("strip_padding", [True, False])
def test_weights_do_not_depend_on_which_token_pads(tiny_task, tmp_path, strip_padding) -> None:
    states = []
    for pad in PADS:
        folder = tmp_path / str(PADS[pad])
        config = tiny_config(
            tiny_task,
            folder,
            "algorithm.adv_estimator=gae",
            "actor_rollout_ref.actor.use_kl_loss=true",
            f"actor_rollout_ref.model.path={model_that_pads_with(tiny_task, folder, pad)}",
            f"actor_rollout_ref.model.use_remove_padding={strip_padding}",
            f"critic.model.use_remove_padding={strip_padding}",
            "trainer.deterministic=true",
        )
        trainer = train(config)
        policy = trainer.actor_rollout_wg.worker.module.state_dict()
        values = trainer.critic_wg.worker.module.state_dict()
        states.append([*policy.items(), *values.items()])
    for state in states[1:]:
        for (name, tensor), (_, expected) in zip(state, states[0], strict=True):
            assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_settings_that_cannot_be_saved_are_told_before_the_first_step(
    tiny_task, tmp_path, lora_rank
) -> None:
    """As of models whose generation config names a temperature, and no sampling."""
    model = model_that_pads_with(tiny_task, tmp_path, "<pad>")
    file = model / "generation_config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "temperature": 0.6, "do_sample": False}))
    path = f"actor_rollout_ref.model.path={model}"
    lora = f"actor_rollout_ref.model.lora_rank={lora_rank}"
    trainer = build_trainer(tiny_config(tiny_task, tmp_path / "run", path, lora))
    try:
        with pytest.raises(ValueError, match=r"no checkpoint could be saved.*temperature"):
            trainer.init_workers()
    finally:
        trainer.shutdown()


def test_ray_is_not_imported_by_the_local_launcher(tiny_task, tmp_path) -> None:
    import subprocess
    import sys

    code = "import sys, main; sys.exit(main.main(sys.argv[1:]) or 7 * ('ray' in sys.modules))"
    argv = [
        "configs/tiny_prompts.yaml",
        f"data.train_files={tiny_task}/train.parquet",
        "data.val_files=null",
        f"actor_rollout_ref.model.path={tiny_task}/model",
        f"trainer.default_local_dir={tmp_path}",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.total_training_steps=1",
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "step     1" in done.stdout


def test_a_step_with_one_mini_batch_needs_no_old_log_probs_and_gives_the_same_update(
    tiny_task, tmp_path
) -> None:
    """Skipping the pass must be invisible: a run that is made to do it has the same weights."""
    common = (
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        "trainer.deterministic=true",
    )
    common += (
        "actor_rollout_ref.actor.ppo_epochs=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    )
    skipping = train(tiny_config(tiny_task, tmp_path / "a", *common))
    assert not skipping.phases.needs_old_log_probs()
    trainer = build_trainer(tiny_config(tiny_task, tmp_path / "b", *common))
    trainer.init_workers()
    trainer.phases.needs_old_log_probs = lambda: True  # type: ignore[method-assign]
    trainer.fit()
    for a, b in zip(
        skipping.actor_rollout_wg.worker.module.parameters(),
        trainer.actor_rollout_wg.worker.module.parameters(),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert "timing_s/old_log_prob" not in read_steps(tmp_path / "a")[1]
    assert "timing_s/old_log_prob" in read_steps(tmp_path / "b")[1]


def test_the_exported_folder_loads_in_transformers_and_gives_the_actors_logits(
    tiny_task, tmp_path
) -> None:
    trainer = train(
        tiny_config(
            tiny_task,
            tmp_path,
            "trainer.save_freq=2",
            "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        )
    )
    exported = AutoModelForCausalLM.from_pretrained(
        tmp_path / "global_step_2/actor/huggingface", dtype=torch.float32
    )
    ids = torch.tensor([[1, 5, 8, 16, 9, 20, 2, 1, 6]])
    with torch.no_grad():
        expected = trainer.actor_rollout_wg.worker.module.eval()(ids).logits
        torch.testing.assert_close(
            exported(ids).logits, expected, atol=0.1, rtol=0.05
        )  # bfloat16 weights


@pytest.mark.vllm
def test_the_exported_folder_generates_in_vllm(tiny_task, tmp_path) -> None:
    pytest.importorskip("vllm")
    from tests.unit.test_rollout import build_engine, encode, model_spec

    train(
        tiny_config(
            tiny_task,
            tmp_path,
            "trainer.save_freq=2",
            "trainer.resume_mode=disable",
            "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
        )
    )
    spec = model_spec(tmp_path / "global_step_2/actor/huggingface")
    completions = build_engine("vllm", spec).inference(encode(spec))
    assert all(completion.token_ids for completion in completions)


@pytest.mark.long
def test_a_run_is_started_from_any_folder(tiny_task, tmp_path) -> None:
    import subprocess
    import sys

    from tests.conftest import PROJECT

    argv = [
        str(PROJECT / "main.py"),
        "configs/tiny_prompts.yaml",
        f"data.train_files={tiny_task}/train.parquet",
        "data.val_files=null",
        f"actor_rollout_ref.model.path={tiny_task}/model",
        "trainer.default_local_dir=here",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.total_training_steps=1",
    ]
    done = subprocess.run(
        [sys.executable, *argv], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here/metrics.jsonl").exists()
    assert (tmp_path / "here/config.yaml").exists()
