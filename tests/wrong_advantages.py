"""Faults around an advantage estimator, which tests of the core and of alarms seed."""

from __future__ import annotations

from typing import Any

import numpy as np


def negated(own: Any, *args: Any, **kwargs: Any) -> Any:
    advantages, returns = own(*args, **kwargs)
    return -advantages, returns


def rolled_index(own: Any, *args: Any, index: Any, **kwargs: Any) -> Any:
    return own(*args, index=np.roll(index, 1), **kwargs)


def a_token_late(own: Any, *args: Any, **kwargs: Any) -> Any:
    advantages, returns = own(*args, **kwargs)
    return advantages.roll(1, 1), returns
