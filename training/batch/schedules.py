"""Offers transformers' learning-rate schedules under verl's names and defaults.

Each is a factor of the optimizer's own rate, after a linear warm-up.
"""

import torch


def get_constant_schedule_with_warmup(
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int,
    num_training_steps: int | None = None,
    last_epoch: int = -1,
) -> torch.optim.lr_scheduler.LambdaLR:
    """Keeps the full rate after the warm-up.

    `num_training_steps` is unused: all schedules are called alike.
    """
    import transformers

    return transformers.get_constant_schedule_with_warmup(optimizer, num_warmup_steps, last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> torch.optim.lr_scheduler.LambdaLR:
    """Lowers the rate by a cosine to `min_lr_ratio` of it, reached at `num_training_steps`.

    That is half a cycle, the default; steps beyond follow the cosine on, so that the rate rises.
    """
    import transformers

    return transformers.get_cosine_with_min_lr_schedule_with_warmup(
        optimizer,
        num_warmup_steps,
        num_training_steps,
        num_cycles,
        last_epoch,
        min_lr_rate=min_lr_ratio,
    )


def get_wsd_schedule_with_warmup(
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    stable_ratio: float = 0.9,
) -> torch.optim.lr_scheduler.LambdaLR:
    """Warms up, keeps the full rate for `stable_ratio` of the rest, then decays (arXiv:2404.06395).

    The warm-up starts at `min_lr_ratio` of the rate, not at zero; the decay is a cosine down to
    that ratio, which holds from `num_training_steps` on. Stable steps are rounded down.
    """
    import transformers

    steps_after_warmup = num_training_steps - num_warmup_steps
    stable_steps = int(stable_ratio * steps_after_warmup)
    return transformers.get_wsd_schedule(
        optimizer,
        num_warmup_steps,
        steps_after_warmup - stable_steps,
        num_stable_steps=stable_steps,
        min_lr_ratio=min_lr_ratio,
        num_cycles=num_cycles,
        last_epoch=last_epoch,
    )
