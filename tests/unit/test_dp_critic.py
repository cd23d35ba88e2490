"""The values' loss of an update, and each setting that it reads: by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.test_dp_actor import COUNTS, MASK, WEIGHTS
from training.config import CriticConfig
from training.core_algos import GlobalBatchInfo
from workers.dp_critic import value_loss


def gradient(config: CriticConfig, counts: GlobalBatchInfo = COUNTS, **fields: Any) -> Any:
    """Returns gradient, loss and metrics where each value is 1, was 0.9 and returns are 3."""
    vpreds = torch.ones(2, 3, requires_grad=True)
    given = {
        "response_mask": MASK,
        "values": torch.full((2, 3), 0.9),
        "returns": torch.full((2, 3), 3.0),
        **fields,
    }
    loss, metrics = value_loss(vpreds, given, config, counts)
    loss.backward()
    return vpreds.grad, loss.item(), {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize("mode", [mode for mode in WEIGHTS if mode != "seq-mean-token-sum-norm"])
def test_values_learn_returns_by_loss_agg_mode(mode: Any) -> None:
    """Half the squared error: its gradient is value - return, here -2."""
    got, loss, metrics = gradient(CriticConfig(loss_agg_mode=mode))
    weights = torch.tensor(WEIGHTS[mode])
    torch.testing.assert_close(got, -2.0 * weights)
    assert loss == metrics["critic/vf_loss"] == pytest.approx(0.5 * 4 * float(weights.sum()))
    assert metrics["critic/vpred_mean"] == pytest.approx(1.0)


def test_cliprange_value_is_around_the_values_before_the_update() -> None:
    old = torch.full((2, 3), 0.2)
    got, loss, metrics = gradient(CriticConfig(cliprange_value=0.5), values=old)
    # Clipped at 0.7, whose error is the larger one.
    assert not got.any() and metrics["critic/vf_clipfrac"] == 1
    assert loss == pytest.approx(0.5 * 2.3**2)
    got, _, metrics = gradient(CriticConfig(cliprange_value=0.9), values=old)
    assert got.any() and metrics["critic/vf_clipfrac"] == 0


def test_episode_share_weighs_the_rows_of_an_episode() -> None:
    counts = GlobalBatchInfo(
        dp_size=1, batch_num_tokens=3, global_batch_size=1.0, loss_scale_factor=None
    )
    config = CriticConfig(loss_agg_mode="seq-mean-token-mean")
    got, _, _ = gradient(config, counts, episode_share=torch.tensor([2 / 3, 1 / 3]))
    torch.testing.assert_close(got, -2.0 * torch.tensor([[1 / 3, 1 / 3, 0], [1 / 3, 0, 0]]))
