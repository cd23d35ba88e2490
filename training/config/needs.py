"""What estimators may ask for beside rewards and mask, and what each asks for: a table that config and trainer read.

Invariant: it knows names only, so that a config is judged without torch. `register_adv_est` enters a user's own.
"""

from pathlib import Path

import yaml

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
OFFERED: tuple[str, ...] = tuple(_TABLE["offered"])
ESTIMATOR_NEEDS: dict[str, tuple[str, ...]] = {name: tuple(needs) for name, needs in _TABLE["needs"].items()}


def estimator_needs(name: str) -> tuple[str, ...]:
    """Lists what the estimator reads besides rewards and mask; nothing of one that is not known."""
    return ESTIMATOR_NEEDS.get(name, ())
