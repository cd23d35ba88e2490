"""Rows that an update learns beside what was played: their gradient is added, and counted."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from data.protocol import DataProto
from tests.unit.test_actor_critic import SPLITS, make_update
from training import core_algos as algos
from training.config import ActorConfig
from training.core_algos import GlobalBatchInfo
from workers.dp_actor import DataParallelPPOActor
from workers.model import further_rows
from workers.model.attention import use_packed_attention
from workers.model.further_rows import FurtherRows, open_further_rows


class Likely(FurtherRows):
    """Makes the tokens of some rows likelier."""

    metric = "actor/likely_loss"
    coef = 0.5

    def __init__(self) -> None:
        self.updates: list[int] = []

    def batch(self, update: int, share: int, shares: int) -> DataProto:
        self.updates.append(update)
        assert (share, shares) == (0, 1)
        return make_update(seed=5)

    def loss(self, log_prob: Tensor, response_mask: Tensor, counts: GlobalBatchInfo) -> Tensor:
        return algos.aggregate(-log_prob, response_mask, "token-mean", **counts)


@pytest.fixture(scope="module")
def lm(tiny_task: Path) -> nn.Module:
    lm = AutoModelForCausalLM.from_pretrained(tiny_task / "model")
    assert use_packed_attention(lm)
    return lm


def changed(
    lm: nn.Module, data: DataProto, sources: list[FurtherRows], **split: int
) -> tuple[Tensor, dict[str, float]]:
    module = copy.deepcopy(lm)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    actor = DataParallelPPOActor(ActorConfig(grad_clip=1e9, **split), module, optimizer)
    actor.further_rows = sources
    metrics = actor.update_policy(data)
    changes = [p - q for p, q in zip(module.parameters(), lm.parameters(), strict=True)]
    return torch.cat([each.detach().flatten() for each in changes]), metrics


@pytest.mark.seconds
@pytest.mark.parametrize("split", SPLITS)
def test_their_gradient_is_added_to_the_policys_however_rows_are_cut(
    lm: nn.Module, split: dict[str, int]
) -> None:
    alone, without = changed(lm, make_update(), [], **split)
    source = Likely()
    both, metrics = changed(lm, make_update(), [source], **split)
    nothing = make_update()
    nothing.batch["response_mask"].zero_()
    beside, _ = changed(lm, nothing, [Likely()])
    assert beside.norm() > 1e-3, "they are learnt where nothing was sampled, too"
    assert (both - alone - beside).norm() < 2e-5 * beside.norm()
    assert metrics["actor/likely_loss"] > 0 and "actor/likely_loss" not in without
    assert source.updates == [0], "one mini-batch of step 1"


def test_without_any_an_update_without_a_token_moves_nothing(lm: nn.Module) -> None:
    nothing = make_update()
    nothing.batch["response_mask"].zero_()
    change, _ = changed(lm, nothing, [])
    assert not change.any()


def test_a_feature_that_returns_anything_else_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [("mine", "tests.unit.test_further_rows:open_wrong")]
    monkeypatch.setattr(further_rows, "named", lambda _: places)
    with pytest.raises(TypeError, match=r"feature mine returned .*: return a list of FurtherRows"):
        open_further_rows(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]


def open_wrong(config: Any, spec: Any) -> list[Any]:
    return ["rows"]
