"""Tests the checks of the critic."""

from __future__ import annotations

import pytest

from tests.unit.config.helpers import ROLLOUT, ULYSSES, assert_refused, checked, warned


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["critic.optim.betas=[0.9,1]"], "critic.optim.betas[1]=1 (command line): must be below 1"),
        (
            ["critic.enable=false"],
            "algorithm.adv_estimator=gae reads a critic's values: set critic.enable=true, or null",
        ),
        (
            ["critic.model.dtype=float16"],
            "critic.model.dtype=float16 would train without loss scaling, which small gradients "
            f"need in float16: use bfloat16 or float32; {ROLLOUT}.dtype may be float16",
        ),
        (
            ["critic.enable=true", "critic.ulysses_sequence_parallel_size=2"],
            "critic.ulysses_sequence_parallel_size=2 differs from the actor's 1: both read a "
            "step's rows in one order; leave it null",
        ),
        (
            [
                *(f"{ULYSSES}=2", "trainer.n_gpus_per_node=2"),
                *("critic.enable=true", "critic.model.use_remove_padding=false"),
            ],
            f"{ULYSSES}=2 needs critic.model.use_remove_padding=true",
        ),
        (
            ["critic.checkpoint.save_contents=[model]"],
            "critic.checkpoint.load_contents=[model, optimizer, extra] must have model, and "
            "nothing but what critic.checkpoint.save_contents=[model] has, hf_model apart, which "
            "is written for others; or set trainer.resume_mode=disable",
        ),
        (
            ["critic.checkpoint.save_contents=[model,optimizer,extra,hf_model]"],
            "critic.checkpoint.save_contents has hf_model: only the actor is exported; take it out",
        ),
    ],
)
def test_what_the_critic_cannot_do_is_refused(
    overrides: list[str], problem: str, runnable: list[str]
) -> None:
    assert_refused(runnable, overrides, problem)


def test_an_engine_may_be_float16_and_so_may_a_critic_that_is_not_there(
    runnable: list[str],
) -> None:
    overrides = [
        f"{ROLLOUT}.dtype=float16",
        "critic.model.dtype=float16",
        "algorithm.adv_estimator=rloo",
    ]
    assert checked([*runnable, *overrides]) == []


def test_what_a_shared_backbone_leaves_unread_is_a_warning(
    runnable: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    shared = "critic.share_backbone=true"
    read = ["critic.value_loss_coef=0.3", "critic.cliprange_value=0.2", "critic.enable=true"]
    assert warned(caplog, runnable, shared, *read) == []
    assert warned(caplog, runnable, shared, "critic.optim.lr=1e-4", "critic.grad_clip=2") == [
        "critic.share_backbone=true: one model has one optimiser, the actor's; the critic's "
        "grad_clip, optim have no effect"
    ]
