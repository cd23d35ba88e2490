"""Holds the settings of the KL to a reference: its estimators, and the control of its weight."""

from dataclasses import dataclass
from typing import Literal

from training.core_algos.settings import NonNegativeFloat, PositiveFloat, PositiveInt

PlainKL = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
KLKind = Literal[PlainKL, "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"]


@dataclass(frozen=True, kw_only=True)
class KLControlSettings:
    """Describes a controller of the KL's coefficient: `get_kl_controller` makes it."""

    type: Literal["fixed", "adaptive"] = "fixed"  #: adaptive = steered towards target_kl
    kl_coef: NonNegativeFloat = 0.001  #: weight, or first weight
    horizon: PositiveInt = 10000  #: adaptive: rows over which the weight follows
    target_kl: PositiveFloat = 0.1  #: adaptive: nats per token to hold
