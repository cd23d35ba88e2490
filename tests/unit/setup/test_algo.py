"""The small API's algorithms are the trainer's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from setup import algo


def test_the_algorithms_are_the_trainers() -> None:
    torch.manual_seed(0)
    rewards, values, old, new = torch.randn(4, 4, 6).unbind()
    mask = torch.ones(4, 6)

    advantages, returns = algo.compute_gae_advantage_return(
        token_level_rewards=rewards, values=values, response_mask=mask, gamma=0.99, lam=0.95
    )
    assert advantages.shape == returns.shape == (4, 6)
    assert abs(float(advantages.mean())) < 1e-6
    grouped, _ = algo.compute_grpo_advantage(
        token_level_rewards=rewards, response_mask=mask, index=np.array([0, 0, 1, 1])
    )
    assert float(grouped[0, 0] + grouped[1, 0]) == pytest.approx(0, abs=1e-6)
    by_steps, _ = algo.estimate_advantages(rewards, values, torch.zeros(4, 6), 0.9, 0.8)
    assert by_steps.shape == (4, 6)

    loss, metrics = algo.compute_policy_loss(
        old_log_probs=old, log_probs=new, advantages=advantages, response_mask=mask, clip_ratio=0.2
    )
    same_loss = algo.compute_ppo_loss(old, new, advantages, mask, {"clip_ratio": 0.2})
    assert float(loss) == float(same_loss)
    assert 0 < metrics["pg_clipfrac"] < 1
    value_loss, metrics = algo.compute_value_loss(
        vpreds=values, returns=returns, old_values=values, response_mask=mask, cliprange_value=0.2
    )
    assert float(value_loss) == pytest.approx(float(((values - returns) ** 2).mean() / 2))
    assert metrics["vf_clipfrac"] == 0


def test_the_kl_is_subtracted_from_the_rewards_and_its_coefficient_steered() -> None:
    torch.manual_seed(0)
    rewards, new, ref = torch.randn(3, 4, 6).unbind()
    assert torch.equal(algo.compute_kl_penalty(new, ref), new - ref)
    penalised, kl = algo.apply_kl_penalty(
        token_level_rewards=rewards,
        log_probs=new,
        ref_log_probs=ref,
        response_mask=torch.ones(4, 6),
        kl_coef=0.01,
    )
    assert torch.allclose(penalised, rewards - 0.01 * (new - ref))
    assert kl == pytest.approx(float((new - ref).mean()))

    controller = algo.KLController(init_kl_coef=0.01, target_kl=0.01, adaptive=True)
    controller.update(current_kl=0.015, n_steps=1024)
    assert controller.value == pytest.approx(0.01 * (1 + 0.2 * 1024 / 10_000))
    constant = algo.KLController(init_kl_coef=0.01, target_kl=0.01)
    constant.update(current_kl=0.015, n_steps=1024)
    assert constant.value == 0.01
