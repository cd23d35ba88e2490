"""Tests the checks of the policy's update, its loss and its checkpoints."""

from __future__ import annotations

import pytest

from tests.unit.config.helpers import ACTOR, ULYSSES, assert_refused, checked


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            [f"{ACTOR}.optim.lr_warmup_steps=-2"],
            f"{ACTOR}.optim.lr_warmup_steps='-2' (command line): must be -1 or more",
        ),
        ([f"{ACTOR}.clip_ratio_c=1"], f"{ACTOR}.clip_ratio_c='1' (command line): must be above 1"),
        (
            [
                "algorithm.rollout_correction.bypass_mode=true",
                f"{ACTOR}.policy_loss.loss_mode=gspo",
            ],
            "algorithm.rollout_correction.bypass_mode has losses of its own (loss_type): "
            "loss_mode=gspo is not read; leave it at vanilla",
        ),
        (
            [f"{ULYSSES}=2"],
            f"{ULYSSES}=2 does not divide trainer.nnodes x trainer.n_gpus_per_node = 1 ranks: "
            "take one of its divisors",
        ),
        (
            [f"{ULYSSES}=4", "trainer.nnodes=2", "trainer.n_gpus_per_node=3"],
            f"{ULYSSES}=4 does not divide trainer.nnodes x trainer.n_gpus_per_node = 6 ranks: "
            "take one of its divisors",
        ),
        ([f"{ULYSSES}=0"], f"{ULYSSES}='0' (command line): must be above 0"),
        (
            [f"{ACTOR}.checkpoint.load_contents=[optimizer,extra]"],
            f"{ACTOR}.checkpoint.load_contents=[optimizer, extra] must have model, and nothing "
            f"but what {ACTOR}.checkpoint.save_contents=[model, optimizer, extra] has, hf_model "
            "apart, which is written for others; or set trainer.resume_mode=disable",
        ),
        (
            [f"{ACTOR}.checkpoint.save_contents=[hf_model]"],
            f"{ACTOR}.checkpoint.load_contents=[model, optimizer, extra] must have model, and "
            f"nothing but what {ACTOR}.checkpoint.save_contents=[hf_model] has, hf_model apart, "
            "which is written for others; or set trainer.resume_mode=disable",
        ),
        (
            [f"{ACTOR}.checkpoint.load_contents=[model,hf_model]"],
            f"{ACTOR}.checkpoint.load_contents=[model, hf_model] must have model, and nothing but "
            f"what {ACTOR}.checkpoint.save_contents=[model, optimizer, extra] has, hf_model "
            "apart, which is written for others; or set trainer.resume_mode=disable",
        ),
    ],
)
def test_what_the_policy_cannot_do_is_refused(
    overrides: list[str], problem: str, runnable: list[str]
) -> None:
    assert_refused(runnable, overrides, problem)


def test_checkpoints_that_nobody_resumes_may_hold_anything(runnable: list[str]) -> None:
    saving = ["trainer.save_freq=5", f"{ACTOR}.checkpoint.save_contents=[hf_model]"]
    assert checked(runnable, *saving, "trainer.resume_mode=disable") == []
    assert checked(runnable, "trainer.save_freq=5") == []
    partly = [
        f"{ACTOR}.checkpoint.save_contents=[model,hf_model]",
        f"{ACTOR}.checkpoint.load_contents=[model]",
    ]
    assert checked(runnable, "trainer.save_freq=5", *partly) == []
