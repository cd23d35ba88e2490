"""Samples that are more probable than chance lets them be: how far chance goes."""

from __future__ import annotations

import math

import pytest
import torch

from features.alarms.rules.engine import UNLIKELY, nats_of_chance

VOCABULARY = 64
TOKENS = 4000


def nats_at(temperature: float, *, sharpness: float) -> list[float]:
    """Draws at a temperature from policies of another one each, 20 times."""
    torch.manual_seed(0)
    found = []
    for _ in range(20):
        log_probs = (sharpness * torch.randn(TOKENS, VOCABULARY)).log_softmax(-1)
        drawn = torch.multinomial((log_probs / temperature).softmax(-1), 1)
        entropies = -(log_probs.exp() * log_probs).sum(-1)
        shortfall = (log_probs.gather(1, drawn).squeeze(1) + entropies).sum().item()
        found.append(nats_of_chance(TOKENS, shortfall, VOCABULARY))
    return found


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 3.0, 20.0])
def test_samples_of_the_policy_itself_stay_far_within_the_bound(sharpness: float) -> None:
    assert max(nats_at(1.0, sharpness=sharpness)) < UNLIKELY / 5


def test_sharper_samples_are_beyond_it() -> None:
    assert min(nats_at(0.6, sharpness=2.0)) > UNLIKELY


def test_the_bound_is_bernsteins() -> None:
    variance = math.log(VOCABULARY) ** 2 / 4 + 1
    right = 50.0**2 / 2 / (100 * variance + 50 * math.log(VOCABULARY) / 3)
    assert nats_of_chance(100, 50.0, VOCABULARY) == pytest.approx(right)
    assert nats_of_chance(100, -50.0, VOCABULARY) == nats_of_chance(0, 0.0, 1) == 0
