"""The clipped loss, which on the second rank does what a file's words say, each once.

Nan, exit, hang, memory.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.core_algos import get_policy_loss_fn, register_policy_loss

# Micro-batches of this process before the next word.
CALLS: list[int] = []
APART = 6


@register_policy_loss("failing")
def failing_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: Any,
    config: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    faults = Path(config.policy_loss.custom_kwargs["faults"])
    CALLS.append(1)
    left = faults.read_text().split()
    if os.environ.get("RANK") == "1" and left and len(CALLS) % APART == 0:
        faults.write_text(" ".join(left[1:]))
        if left[0] == "exit":
            os.kill(os.getpid(), signal.SIGKILL)
        if left[0] == "hang":
            time.sleep(600)
        if left[0] == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        log_prob = log_prob * float("nan")
    arguments = old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config
    return get_policy_loss_fn("vanilla")(*arguments)
