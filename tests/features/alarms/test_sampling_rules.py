"""Samples that are more, or less, probable than chance lets them be: how far chance goes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from features.alarms.rules.engine import UNLIKELY, nats_of_chance

VOCABULARY = 64
TOKENS = 4000


def nats_of(drawn_from: Tensor, log_probs: Tensor) -> float:
    """Draws a token of each distribution; judges it by log-probs, as a step's entropy is a mean."""
    drawn = torch.multinomial(drawn_from, 1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    differences = -log_probs.gather(1, drawn).squeeze(1) - entropies.mean()
    return nats_of_chance(
        differences.sum().item(), differences.square().sum().item(), log_probs.shape[1]
    )


def nats_at(
    temperature: float, *, sharpness: float, vocabulary: int = VOCABULARY, times: int = 20
) -> list[float]:
    """Draws at a temperature from policies of another one each."""
    torch.manual_seed(0)
    found = []
    for _ in range(times):
        log_probs = (sharpness * torch.randn(TOKENS, vocabulary)).log_softmax(-1)
        found.append(nats_of((log_probs / temperature).softmax(-1), log_probs))
    return found


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Keeps the most probable tokens that reach a share together."""
    ordered, order = probs.sort(dim=-1, descending=True)
    kept = ordered * (ordered.cumsum(-1) - ordered < top_p)
    return torch.zeros_like(probs).scatter(1, order, kept)


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 3.0, 20.0])
def test_samples_of_the_policy_itself_stay_far_within_the_bound(sharpness: float) -> None:
    assert max(nats_at(1.0, sharpness=sharpness)) < UNLIKELY / 3


def test_rare_tokens_that_were_never_drawn_ring_nothing() -> None:
    """One token in 20,000 has a surprise of ten nats: most steps have none of them."""
    torch.manual_seed(0)
    rare = 1 / 20_000
    probs = torch.tensor([1 - rare, rare]).expand(1000, 2)
    assert max(nats_of(probs, probs.log()) for _ in range(200)) < UNLIKELY / 3


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_sharper_and_flatter_samples_are_beyond_it(temperature: float) -> None:
    assert min(nats_at(temperature, sharpness=2.0)) > UNLIKELY


@pytest.mark.seconds
@pytest.mark.parametrize(("top_p", "steps"), [(0.8, 1), (0.95, 4)])
def test_a_nucleus_that_is_not_reported_is_beyond_it_in_few_steps(top_p: float, steps: int) -> None:
    """Of 4,000 tokens a step, in a vocabulary of 300."""
    torch.manual_seed(0)
    for _ in range(2):
        log_probs = (2.0 * torch.randn(steps * TOKENS, 300)).log_softmax(-1)
        assert nats_of(nucleus(log_probs.exp(), top_p), log_probs) > UNLIKELY


def test_the_bound_is_bernsteins() -> None:
    variance = 200.0 + math.log(VOCABULARY) ** 2
    right = 50.0**2 / 2 / (variance + 50 * math.log(VOCABULARY) / 3)
    assert nats_of_chance(-50.0, 200.0, VOCABULARY) == pytest.approx(right)
    assert nats_of_chance(50.0, 200.0, VOCABULARY) == pytest.approx(50.0**2 / 4 / variance)
    assert nats_of_chance(0.0, 200.0, VOCABULARY) == nats_of_chance(9.0, 0.0, 1) == 0
