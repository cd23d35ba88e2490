"""Tests the checks of the run: ranks, launcher, trackers, finished groups."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.unit.config.helpers import ACTOR, assert_refused, checked, load


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["trainer.resume_mode=resume_path"],
            "trainer.resume_mode=resume_path needs trainer.resume_from_path: a global_step_N "
            "folder",
        ),
        (
            ["trainer.nnodes=2"],
            "trainer.nnodes=2 needs ray_kwargs.ray_init.address: run `ray start --head` on the "
            "first machine, `ray start --address=HOST:6379` on the others, and set "
            "ray_kwargs.ray_init.address=auto; for ranks on this machine alone set "
            "trainer.n_gpus_per_node",
        ),
        (
            ["trainer.n_gpus_per_node=8", "trainer.launcher=local"],
            "trainer.nnodes=1 x trainer.n_gpus_per_node=8: trainer.launcher=local has one rank; "
            "use trainer.launcher=ray",
        ),
        (
            ["trainer.critic_warmup=2", "algorithm.adv_estimator=rloo"],
            "trainer.critic_warmup=2: there is no critic to warm up; set it to 0, or "
            "critic.enable=true and no critic.share_backbone",
        ),
    ],
)
def test_a_run_that_cannot_start_is_refused(
    overrides: list[str], problem: str, runnable: list[str]
) -> None:
    assert_refused(runnable, overrides, problem)


def test_finished_groups_go_with_no_correction_only(runnable: list[str]) -> None:
    own = (
        "trainer.train_finished_groups=true",
        "algorithm.adv_estimator=grpo",
        f"{ACTOR}.ppo_mini_batch_size=null",
    )
    own += (f"{ACTOR}.ppo_epochs=1", "actor_rollout_ref.rollout.n=2")
    correction = "algorithm.rollout_correction"
    assert checked(runnable, *own, f"{correction}.rollout_is=off") == []
    (problem,) = checked(
        runnable, *own, f"{correction}.rollout_rs=token_k1", f"{correction}.rollout_rs_threshold=2"
    )
    assert f"which {correction}.rollout_rs=token_k1 cannot do" in problem


def test_cuda_is_asked_for_only_where_the_config_names_it(
    runnable: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert checked(runnable, "trainer.device=cuda") == [
        "trainer.device=cuda: torch finds no CUDA device here; use cpu, or null for what there is"
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("nobody asked for CUDA"))
    assert checked(runnable) == checked(runnable, "trainer.device=cpu") == []
    # The other nodes of a cluster may have what this machine has not.
    joined = [
        "trainer.device=cuda",
        "trainer.n_gpus_per_node=2",
        "ray_kwargs.ray_init.address=auto",
    ]
    assert checked(runnable, *joined) == []


def test_several_ranks_are_started_by_ray(runnable: list[str]) -> None:
    pytest.importorskip("ray")
    assert checked(runnable, "trainer.launcher=ray") == []
    nodes = ["trainer.n_gpus_per_node=2", "trainer.nnodes=2"]
    assert checked(runnable, *nodes, "ray_kwargs.ray_init.address=auto") == []
    assert len(checked(runnable, *nodes, "ray_kwargs.ray_init.address=local")) == 1
    assert len(checked(runnable, *nodes, "ray_kwargs.ray_init.address=null")) == 1


def test_a_tracker_that_is_missing_is_left_out_where_another_logger_stands_beside_it(
    runnable: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "wandb" else there(name)
    )
    logger = "trainer.logger=[console,wandb]"
    assert checked(runnable, logger) == []
    assert "trainer.logger has wandb, which is not installed" in caplog.text
    trainer = load(logger).trainer
    assert (trainer.logger, trainer.trackers) == (("console", "wandb"), ("console",))
    assert load("trainer.logger=[file,console]").trainer.trackers == ("file", "console")
