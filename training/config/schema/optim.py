"""Holds the settings of an optimiser: `actor_rollout_ref.actor.optim`, `critic.optim`."""

from typing import Any, Literal

from training.config.section import (
    Betas,
    Fraction,
    NonNegativeFloat,
    NonNegativeOrMinusOne,
    PositiveFloat,
    Section,
)


class OptimConfig(Section):
    """An optimiser and its learning-rate schedule."""

    #: class of optimizer_impl: AdamW, Muon (matrices; AdamW for the rest), Adafactor, SGD ...; or
    #: FILE.py:CLASS
    optimizer: str = "AdamW"
    optimizer_impl: str = "torch.optim"  #: module that has the class, as bitsandbytes.optim
    #: further arguments of the class, by name
    override_optimizer_config: dict[str, Any] | None = None
    lr: PositiveFloat = 1e-6  #: learning rate after warm-up
    weight_decay: NonNegativeFloat = 0.01  #: decoupled weight decay
    betas: Betas = (0.9, 0.999)  #: decay of the first and second moment
    #: training steps of linear warm-up, whatever updates a step makes; -1 = by
    #: lr_warmup_steps_ratio
    lr_warmup_steps: NonNegativeOrMinusOne = -1
    lr_warmup_steps_ratio: Fraction = 0.0  #: warm-up as a part of all training steps
    min_lr_ratio: Fraction = 0.0  #: final learning rate as a part of lr (cosine, wsd)
    num_cycles: PositiveFloat = 0.5  #: cosine waves over the run; 0.5 = down once
    #: shape after warm-up; wsd = hold, then decay
    scheduler: Literal["constant", "cosine", "wsd"] = "constant"
