"""Estimators of a user's own, each wrong in its way; the last two are right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from training.core_algos import register_adv_est


@register_adv_est("raises", needs=("index",))
def raises(token_level_rewards: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    raise RuntimeError("a formula without an end")


@register_adv_est("nan")
def nan(token_level_rewards: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    wrong = token_level_rewards / 0 * 0
    return wrong, wrong


@register_adv_est("narrow")
def narrow(token_level_rewards: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return token_level_rewards[:, :1], token_level_rewards[:, :1]


@register_adv_est("huge")
def huge(token_level_rewards: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.full_like(token_level_rewards, 1e300, dtype=torch.float64)
    return wide, wide


@register_adv_est("overwrites")
def overwrites(
    token_level_rewards: Tensor, response_mask: Tensor, **_: Any
) -> tuple[Tensor, Tensor]:
    token_level_rewards.fill_(7.0)
    response_mask.zero_()
    return token_level_rewards, token_level_rewards


@register_adv_est("of_continuations", needs=("branch_returns",))
def of_continuations(
    token_level_rewards: Tensor, branch_returns: Any, **_: Any
) -> tuple[Tensor, Tensor]:
    """Gives each row the mean return of its first turn's continuations; raises without any."""
    means = torch.tensor([sum(returns[0]) / len(returns[0]) for returns in branch_returns])
    wide = means[:, None].expand_as(token_level_rewards).clone()
    return wide, wide


@register_adv_est("remembers", needs=("state",))
def remembers(
    token_level_rewards: Tensor, state: dict[str, Any], **_: Any
) -> tuple[Tensor, Tensor]:
    """Gives every token the number of the batch, from 1 on."""
    state["batches"] = state.get("batches", 0) + 1
    wide = torch.full_like(token_level_rewards, float(state["batches"]))
    return wide, wide
