"""An estimator and a loss of your own: `custom_algorithm=examples/custom_algorithm.py`.

    python main.py configs/tiny_prompts.yaml custom_algorithm=examples/custom_algorithm.py \\
        algorithm.adv_estimator=group_rank actor_rollout_ref.rollout.n=4 \\
        actor_rollout_ref.actor.policy_loss.loss_mode=soft_clip \\
        actor_rollout_ref.actor.policy_loss.custom_kwargs.sharpness=4

Both are pure functions of tensors; the names under which they are registered are all that a config
needs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.core_algos import LossAggMode, agg_loss, register_adv_est, register_policy_loss


@register_adv_est("group_rank", needs=("index",))
def group_rank_advantage(
    *, token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Ranks a row among its prompt's rows, from -1 (worst) to 1 (best), on its sampled tokens.

    Arguments are taken by name from the batch (token_level_rewards, response_mask, values, ...),
    `index` (the prompt's uid) and the algorithm section (gamma, lam, config, whose `custom_kwargs`
    are yours).

    Args:
        token_level_rewards, response_mask: (batch, response_len).
        index: (batch,) the prompt group of each row.
    Returns: advantages, returns (the same): (batch, response_len), zero where the mask is zero.
    """
    scores = (token_level_rewards * response_mask).sum(dim=1)  # (batch,)
    same_prompt = torch.from_numpy(index[:, None] == index[None, :])  # (batch, batch)
    comparison = (scores[:, None] - scores[None, :]).sign() * same_prompt  # (batch, batch)
    others = (same_prompt.sum(dim=1) - 1).clamp(min=1)
    rank = comparison.sum(dim=1) / others
    advantages = rank[:, None] * response_mask
    return advantages, advantages


@register_policy_loss("soft_clip")
def soft_clip_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: LossAggMode,
    config: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Squeezes the ratio smoothly instead of clipping it: (tanh(s (r - 1)) / s + 1) A.

    Called on a micro-batch, all tensors (rows, response_len). `config.global_batch_info` holds the
    whole mini-batch's counts: with them `agg_loss` gives this micro-batch's share of the loss, and
    a metric made the same way is its share too; shares are summed.
    """
    counts = config.global_batch_info
    sharpness = config.policy_loss.custom_kwargs.get("sharpness", 2.0)
    ratio = (log_prob - old_log_prob).exp()
    squeezed = torch.tanh(sharpness * (ratio - 1)) / sharpness + 1
    loss = agg_loss(-advantages * squeezed, response_mask, loss_agg_mode, **counts)
    tokens = max(counts["batch_num_tokens"], 1)
    mean_ratio = (ratio.detach() * response_mask).sum() / tokens
    return loss, {"actor/mean_ratio": mean_ratio}
