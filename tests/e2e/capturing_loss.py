"""The clipped loss, which writes what it was given, and its gradient, to a file for each call."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from training.core_algos import get_policy_loss_fn, register_policy_loss

NUMBERS = itertools.count()


@register_policy_loss("capturing")
def capturing_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: Any,
    config: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    folder = Path(config.policy_loss.custom_kwargs["folder"])
    place = folder / f"{os.getpid()}-{next(NUMBERS):05d}.npz"
    given = {"old_log_probs": old_log_prob, "advantages": advantages, "mask": response_mask}
    arrays = {name: tensor.detach().numpy().copy() for name, tensor in given.items()}
    arrays["log_prob"] = log_prob.detach().numpy().copy()

    def save(gradient: Tensor) -> None:
        np.savez(place, gradient=gradient.detach().numpy(), **arrays)

    log_prob.register_hook(save)
    arguments = old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config
    return get_policy_loss_fn("vanilla")(*arguments)
