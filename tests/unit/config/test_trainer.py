"""Tests the checks of the run: ranks, launcher, trackers, finished groups."""

from __future__ import annotations

import pytest
import torch

from tests.unit.config.helpers import ACTOR, ROLLOUT, assert_refused, checked, warned


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
            ["trainer.critic_warmup=2", "trainer.total_training_steps=2"],
            "trainer.critic_warmup=2 leaves no step to the actor: trainer.total_training_steps=2; "
            "lower the first or raise the second",
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


def test_a_step_for_the_actor_after_the_warm_up_is_enough(runnable: list[str]) -> None:
    steps = ["trainer.critic_warmup=2", "trainer.total_training_steps=3"]
    assert checked(runnable, *steps) == []


def test_groups_that_a_deterministic_run_waits_for_are_said(
    runnable: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    grpo = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2")
    groups = ("trainer.train_finished_groups=true", *grpo)
    assert warned(caplog, runnable, *groups) == []
    (sentence,) = warned(caplog, runnable, *groups, "trainer.deterministic=true")
    assert sentence.startswith(
        "trainer.train_finished_groups=true has no effect with trainer.deterministic=true"
    )


def test_a_checkpoint_that_is_not_resumed_from_is_a_warning(
    runnable: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert warned(caplog, runnable, "trainer.resume_from_path=/old") == [
        "trainer.resume_from_path=/old has no effect with trainer.resume_mode=auto: set it to "
        "resume_path"
    ]


def test_settings_of_ray_that_nothing_reads_are_a_warning(
    runnable: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("ray")
    assert warned(caplog, runnable, "ray_kwargs.ray_init.num_cpus=2") == [
        "ray_kwargs.ray_init has no effect: the one rank runs in this process, without Ray; set "
        "trainer.launcher=ray where it is to run in the cluster"
    ]
    of_ray = ["trainer.launcher=ray", "ray_kwargs.ray_init.num_cpus=2"]
    assert warned(caplog, runnable, *of_ray) == []


def test_arguments_that_ray_init_does_not_take_are_named(runnable: list[str]) -> None:
    pytest.importorskip("ray")
    settings = ["num_cpu=2", "include_dashboard=false", "_system_config={}", "zzz=1"]
    ray_init = [f"ray_kwargs.ray_init.{setting}" for setting in settings]
    near, far = checked(runnable, "trainer.launcher=ray", *ray_init)
    assert near.startswith("ray_kwargs.ray_init.num_cpu: ")
    assert near.endswith(". Did you mean 'num_cpus'?")
    assert far.startswith(
        "ray_kwargs.ray_init.zzz: there is no such argument; ray.init takes address, num_cpus, "
    )


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        ("critic", []),
        ("actor_rollout_ref.actor", ["algorithm.adv_estimator=reinforce_plus_plus"]),
        ("actor_rollout_ref.ref", ["algorithm.use_kl_in_reward=true"]),
    ],
)
def test_sharding_on_one_rank_is_a_warning(
    section: str, settings: list[str], runnable: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("ray")
    whole = f"{section}.fsdp_config.reshard_after_forward=false"
    assert warned(caplog, runnable, *settings, whole) == [
        f"{whole} has no effect on one rank, which holds all parameters"
    ]
    assert warned(caplog, runnable, *settings, whole, "trainer.n_gpus_per_node=2") == []
