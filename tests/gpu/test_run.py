"""Whole runs of the tiny task on the device, in this process.

They learn, and are repeated and resumed bitwise.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.e2e.test_resume import tensors
from tests.e2e.test_training import read_steps, tiny_config
from training.building import build_trainer
from training.ray_trainer import RayPPOTrainer
from workers.ranks.worker_process import start_worker, strictly_deterministic

pytestmark = pytest.mark.gpu

CONSTANT = ("actor_rollout_ref.actor.optim.scheduler=constant", "critic.optim.scheduler=constant")


def run(
    task: Path, run_dir: Path, device: torch.device, steps: int, *overrides: str
) -> RayPPOTrainer:
    trainer = build_trainer(
        tiny_config(
            task,
            run_dir,
            f"trainer.device={device.type}",
            "trainer.launcher=local",
            "data.val_files=null",
            f"trainer.total_training_steps={steps}",
            *CONSTANT,
            *overrides,
        )
    )
    trainer.init_workers()
    trainer.fit()
    return trainer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ppo_learns_on_the_device_and_engine_and_trainer_agree(
    tiny_task, tmp_path, device, dtype
) -> None:
    size = ("data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=32")
    dtypes = (f"actor_rollout_ref.model.dtype={dtype}", f"critic.model.dtype={dtype}")
    trainer = run(
        tiny_task,
        tmp_path,
        device,
        20,
        *size,
        *dtypes,
        "actor_rollout_ref.rollout.n=2",
        "data.seed=0",
    )
    steps = read_steps(tmp_path)
    rewards = [step["critic/score/mean"] for step in steps]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    assert all(step["actor/skipped_updates"] == 0 for step in steps)
    limit = 1e-4 if dtype == "float32" else 0.1
    assert all(step["training/rollout_probs_diff_max"] < limit for step in steps)
    module = trainer.actor_rollout_wg.worker.module
    assert {(p.device, p.dtype) for p in module.parameters()} == {(device, torch.float32)}


def test_a_deterministic_run_is_repeated_and_goes_on_bitwise(tiny_task, tmp_path, device) -> None:
    """Runs GRPO in bfloat16, whose groups share prompts.

    Attention with a mask is not deterministic by itself.
    """
    overrides = (
        "trainer.deterministic=true",
        "trainer.save_freq=1",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.model.dtype=bfloat16",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    )
    for folder, parts in {"whole": (4,), "again": (4,), "resumed": (2, 4)}.items():
        for steps in parts:
            run(tiny_task, tmp_path / folder, device, steps, *overrides)
    for folder in ("again", "resumed"):
        for part in ("actor/model", "actor/optimizer", "critic/model", "critic/optimizer"):
            expected = tensors(tmp_path / "whole/global_step_4" / part)
            got = tensors(tmp_path / folder / "global_step_4" / part)
            assert [
                name for name in expected if not torch.equal(expected[name], got[name])
            ] == [], (folder, part)


def test_a_run_that_offloads_has_the_numbers_of_one_that_does_not_and_goes_on_bitwise(
    tiny_task, tmp_path, device
) -> None:
    """The first checkpoint is from before the actor's first step: its optimiser has no state."""
    overrides = (
        "trainer.deterministic=true",
        "trainer.save_freq=1",
        "trainer.critic_warmup=1",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.model.dtype=bfloat16",
    )
    sections = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
    away = [
        f"{section}.fsdp_config.{kind}_offload=true"
        for section in sections
        for kind in ("param", "optimizer")
    ]
    first = (
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path}/offloaded/global_step_1",
    )
    for folder, keys in {
        "kept": ["trainer.save_freq=3"],
        "offloaded": away,
        "resumed": [*away, *first],
    }.items():
        trainer = run(tiny_task, tmp_path / folder, device, 3, *overrides, *keys)
        worker = trainer.actor_rollout_wg.worker
        at_rest = {
            p.device
            for module in (worker.module, worker.ref.actor_module)
            for p in module.parameters()
        }
        assert at_rest == {device if folder == "kept" else torch.device("cpu")}
    for folder in ("offloaded", "resumed"):
        for part in ("actor/model", "actor/optimizer", "critic/model", "critic/optimizer"):
            expected = tensors(tmp_path / "kept/global_step_3" / part)
            got = tensors(tmp_path / folder / "global_step_3" / part)
            assert [
                name for name in expected if not torch.equal(expected[name], got[name])
            ] == [], (folder, part)


def test_a_deterministic_worker_sets_what_cublas_reads(device, monkeypatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    start_worker(device, deterministic=False)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    start_worker(device, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    with strictly_deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_the_update_of_a_batch_is_bitwise_the_same_twice(tiny_task, tmp_path, device) -> None:
    """Has rows so long that attention's backward pass adds parts up, by default in any order."""
    from tests.benchmarks.mfu import Settings, build_worker, make_batch

    model = {
        "hidden": 128,
        "intermediate": 128,
        "layers": 2,
        "heads": 2,
        "kv_heads": 1,
        "vocab": 512,
    }
    batch = {"rows": 8, "prompt": 256, "response": 256, "group": 4}
    settings = Settings(device=device.type, deterministic=1, **model, **batch)
    ends = []
    for _ in range(2):
        worker = build_worker(settings)
        worker.update_actor(make_batch(settings))
        ends.append([p.detach().clone() for p in worker.module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
