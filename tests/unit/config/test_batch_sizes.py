"""Tests that batch sizes divide, and that token budgets hold a row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.config.helpers import ACTOR, ROLLOUT, assert_refused
from training.config import ActorConfig, MicroBatching, PPOConfig, RefConfig


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["data.train_batch_size=1000", f"{ACTOR}.ppo_mini_batch_size=256"],
            f"data.train_batch_size=1000 must be a multiple of {ACTOR}.ppo_mini_batch_size=256: a "
            "step is cut into equal mini-batches",
        ),
        (
            ["critic.ppo_mini_batch_size=3"],
            "data.train_batch_size=1024 must be a multiple of critic.ppo_mini_batch_size=3: a "
            "step is cut into equal mini-batches",
        ),
        (
            [f"{ACTOR}.ppo_micro_batch_size_per_gpu=6", f"{ROLLOUT}.n=2"],
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=6 does not divide the 2048 rows of a "
            "mini-batch on a rank (data.train_batch_size=1024 x rollout.n=2 / 1 ranks)",
        ),
        (
            ["critic.ppo_micro_batch_size_per_gpu=3", "critic.ppo_mini_batch_size=256"],
            "critic.ppo_micro_batch_size_per_gpu=3 does not divide the 256 rows of a mini-batch "
            "on a rank (critic.ppo_mini_batch_size=256 x rollout.n=1 / 1 ranks)",
        ),
        (
            ["trainer.n_gpus_per_node=6", f"{ACTOR}.ppo_mini_batch_size=256"],
            f"{ACTOR}.ppo_mini_batch_size=256 x rollout.n=1 = 256 rows do not divide among 6 ranks",
        ),
        (
            ["trainer.n_gpus_per_node=6"],
            "data.train_batch_size=1024 x rollout.n=1 = 1024 rows do not divide among 6 ranks",
        ),
        (
            [f"{ACTOR}.use_dynamic_bsz=false"],
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=null: give a number of rows, or "
            "use_dynamic_bsz=true",
        ),
        (
            [f"{ACTOR}.ppo_max_token_len_per_gpu=1023"],
            f"{ACTOR}.ppo_max_token_len_per_gpu=1023 cannot hold one row of "
            "data.max_prompt_length + data.max_response_length = 1024 tokens",
        ),
        (
            ["critic.ppo_max_token_len_per_gpu=1000"],
            "critic.ppo_max_token_len_per_gpu=1000 cannot hold one row of data.max_prompt_length "
            "+ data.max_response_length = 1024 tokens",
        ),
        (
            ["actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=5", f"{ACTOR}.use_kl_loss=true"],
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=5 cannot hold one row of "
            "data.max_prompt_length + data.max_response_length = 1024 tokens",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    overrides: list[str], problem: str, runnable: list[str]
) -> None:
    assert_refused(runnable, overrides, problem)


@pytest.mark.parametrize(
    ("use_dynamic_bsz", "micro_batch_size", "wanted"),
    [
        (None, None, MicroBatching(max_token_len=99)),
        (None, 4, MicroBatching(micro_batch_size=4)),
        (True, 4, MicroBatching(max_token_len=99)),
        (False, 4, MicroBatching(micro_batch_size=4)),
    ],
)
def test_a_token_budget_cuts_unless_rows_are_asked_for(
    use_dynamic_bsz: bool | None, micro_batch_size: int | None, wanted: MicroBatching
) -> None:
    actor = ActorConfig(
        use_dynamic_bsz=use_dynamic_bsz,
        ppo_micro_batch_size_per_gpu=micro_batch_size,
        ppo_max_token_len_per_gpu=99,
    )
    assert actor.micro_batching == wanted
    policy = replace(PPOConfig().actor_rollout_ref, actor=actor)
    assert policy.ref_micro_batching == policy.log_prob_micro_batching == wanted
    rows = replace(policy, ref=RefConfig(log_prob_micro_batch_size_per_gpu=7))
    assert rows.ref_micro_batching == MicroBatching(micro_batch_size=7)
