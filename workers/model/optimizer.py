"""The optimiser and its schedule, as `actor.optim` and `critic.optim` set them.

Invariant: only parameters that train are the optimiser's, and the schedule advances once a training
step.
"""

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from training.batch.schedules import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_wsd_schedule_with_warmup,
)
from training.config import OptimConfig


def build_optimizer(module: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """Makes AdamW in its fused form: one pass over memory on CPU and CUDA alike."""
    return torch.optim.AdamW(
        [parameter for parameter in module.parameters() if parameter.requires_grad],
        lr=optim.lr,
        betas=tuple(optim.betas),
        weight_decay=optim.weight_decay,
        fused=True,
    )


def build_scheduler(optimizer: Optimizer, optim: OptimConfig, total_steps: int) -> LambdaLR:
    """Makes the schedule over `total_steps` training steps, not optimiser steps.

    Warm-up is `lr_warmup_steps`, or a ratio of all steps where that is negative. wsd
    (arXiv:2404.06395) holds the rate for nine tenths of the steps after the warm-up, and then
    decays by a cosine.
    """
    warmup_steps = optim.lr_warmup_steps
    if warmup_steps < 0:
        warmup_steps = int(optim.lr_warmup_steps_ratio * total_steps)
    if optim.scheduler == "constant":
        return get_constant_schedule_with_warmup(optimizer, warmup_steps)
    if optim.scheduler == "cosine":
        return get_cosine_schedule_with_warmup(
            optimizer,
            warmup_steps,
            total_steps,
            min_lr_ratio=optim.min_lr_ratio,
            num_cycles=optim.num_cycles,
        )
    return get_wsd_schedule_with_warmup(
        optimizer, warmup_steps, total_steps, min_lr_ratio=optim.min_lr_ratio
    )
