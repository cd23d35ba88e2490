"""Which tensors an update leaves as they were although it could have moved them."""

from __future__ import annotations

import pytest
import torch

from features.alarms.probes.movement import movement_flags

MATRIX, OTHER, NORM = "matrix", "other", "norm"


@pytest.mark.parametrize(
    ("way", "movable"),
    # By the rate, as AdamW moves numbers; by the rate times a small gradient, as plain SGD does.
    [(1e-3, True), (1e-6, False), (0.0, True)],
)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_tensor_is_expected_to_move_by_as_much_as_the_others_do(
    way: float, movable: bool, decay: float
) -> None:
    before = {name: torch.full((4,), 0.02) for name in (MATRIX, OTHER)} | {NORM: torch.ones(4)}
    kept = 1 - 1e-3 * decay
    now = {name: tensor * kept for name, tensor in before.items()}
    for name in (MATRIX, OTHER):
        now[name] = now[name] + way
    flags = movement_flags(now, before, rate=1e-3, decay=decay, updates=1)
    assert bool(flags[f"moved {MATRIX}"]) == (way > 0)
    assert not flags[f"moved {NORM}"]
    assert bool(flags[f"movable {NORM}"]) == movable
    assert flags[f"movable {MATRIX}"]
