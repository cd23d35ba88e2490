"""Advantages are those of their papers: computed again here, by plain loops over numbers.

No alarm knows these formulas, so that an edit in place rings nothing; what an alarm cannot see of
an estimator, such as another discount, is seen here. Each fault that is seeded into training for
the alarm `advantages_wrong` (tests/wrong_advantages.py), and two more, must be
found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.wrong_advantages import a_token_late, negated, rolled_index
from training.core_algos import call_adv_estimator, get_adv_estimator_fn
from training.core_algos.verl_form import accepted_arguments

GAMMA = 0.95
LAM = 0.9
EPSILON = 1e-6
Estimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Settings:
    """What estimators read as `config`."""

    gamma = GAMMA


def batch(seed: int) -> dict[str, Any]:
    """Five groups of four episodes, with masked tokens in between; rewards on some tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = 20, 12
    mask = (torch.rand(rows, width, generator=generator) < 0.6).long()
    mask[:, 0] = 1
    rewards = torch.randn(rows, width, generator=generator).double()
    return {
        "token_level_rewards": rewards * (torch.rand(rows, width, generator=generator) < 0.3),
        "response_mask": mask,
        "values": torch.randn(rows, width, generator=generator).double(),
        "index": np.repeat([f"group {number}" for number in range(5)], 4),
        "gamma": GAMMA,
        "lam": LAM,
        "config": Settings(),
    }


def tokens(given: dict[str, Any], name: str) -> list[np.ndarray]:
    """The numbers of each row's sampled tokens."""
    mask = given["response_mask"].numpy().astype(bool)
    lines = given[name].numpy()
    return [line[inside] for line, inside in zip(lines, mask, strict=True)]


def gae_of(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """Generalised advantages of one episode's tokens (arXiv:1506.02438, eq. 16)."""
    advantages = np.zeros_like(rewards)
    advantage = 0.0
    next_value = 0.0
    for token in range(len(rewards) - 1, -1, -1):
        surprise = rewards[token] + gamma * next_value - values[token]
        advantage = surprise + gamma * lam * advantage
        advantages[token] = advantage
        next_value = values[token]
    return advantages


def whitened(lines: list[np.ndarray]) -> list[np.ndarray]:
    flat = np.concatenate(lines)
    return [(line - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8) for line in lines]


def gae(given: dict[str, Any]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rewards, values = tokens(given, "token_level_rewards"), tokens(given, "values")
    plain = [gae_of(r, v, GAMMA, LAM) for r, v in zip(rewards, values, strict=True)]
    returns = [advantage + v for advantage, v in zip(plain, values, strict=True)]
    return whitened(plain), returns


def reinforce_plus_plus(given: dict[str, Any]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rewards = tokens(given, "token_level_rewards")
    returns = [gae_of(r, np.zeros_like(r), GAMMA, 1.0) for r in rewards]
    return whitened(returns), returns


def of_group(scores: np.ndarray, by_std: bool, leaves_out: bool) -> np.ndarray:
    """A group's advantages from its members' scores."""
    deviations = scores - scores.mean()
    if leaves_out:
        return deviations * len(scores) / (len(scores) - 1)
    if by_std:
        return deviations / (scores.std(ddof=1) + EPSILON)
    return deviations


def of_groups(
    by_std: bool, leaves_out: bool = False
) -> Callable[[dict[str, Any]], tuple[list[np.ndarray], list[np.ndarray]]]:
    def formula(given: dict[str, Any]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        lines = tokens(given, "token_level_rewards")
        scores = np.array([line.sum() for line in lines])
        advantages = np.zeros_like(scores)
        for group in np.unique(given["index"]):
            members = given["index"] == group
            advantages[members] = of_group(scores[members], by_std, leaves_out)
        spread = [np.full_like(line, one) for line, one in zip(lines, advantages, strict=True)]
        return spread, spread

    return formula


# By test: the estimator, its settings, the formula.
FORMULAS: dict[str, tuple[str, dict[str, Any], Callable[..., Any]]] = {
    "gae": ("gae", {}, gae),
    "reinforce_plus_plus": ("reinforce_plus_plus", {}, reinforce_plus_plus),
    "grpo": ("grpo", {}, of_groups(by_std=True)),
    "grpo without std": (
        "grpo",
        {"norm_adv_by_std_in_grpo": False},
        of_groups(by_std=False),
    ),
    "rloo": ("rloo", {}, of_groups(by_std=False, leaves_out=True)),
}


def difference(
    found: tuple[torch.Tensor, torch.Tensor], right: Any, given: dict[str, Any]
) -> float:
    """How far advantages and returns are off at most, also by what stands outside of the mask."""
    mask = given["response_mask"].bool()
    worst = 0.0
    for tensor, lines in zip(found, right, strict=True):
        expected = torch.zeros_like(tensor)
        expected[mask] = torch.from_numpy(np.concatenate(lines)).to(tensor.dtype)
        worst = max(worst, float((tensor - expected).abs().max()))
    return worst


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("what", FORMULAS)
def test_advantages_are_those_of_the_formula(what: str, seed: int) -> None:
    name, settings, formula = FORMULAS[what]
    given = batch(seed) | settings
    assert difference(call_adv_estimator(name, **given), formula(given), given) < 1e-5


def values_a_token_late(own: Estimator, *args: Any, values: torch.Tensor, **kwargs: Any) -> Any:
    return own(*args, values=values.roll(1, 1), **kwargs)


def a_discount_of_its_own(own: Estimator, *args: Any, **kwargs: Any) -> Any:
    return own(*args, **{**kwargs, "gamma": 0.9})


FAULTS = [
    ("gae", negated),
    ("gae", values_a_token_late),
    ("gae", a_discount_of_its_own),
    ("gae", a_token_late),
    ("reinforce_plus_plus", negated),
    ("grpo", negated),
    ("grpo", rolled_index),
    ("grpo", a_token_late),
    ("rloo", negated),
    ("rloo", rolled_index),
]


@pytest.mark.parametrize(("what", "fault"), FAULTS)
def test_a_fault_makes_other_advantages_than_the_formula(what: str, fault: Any) -> None:
    name, settings, formula = FORMULAS[what]
    given = batch(0) | settings
    own = get_adv_estimator_fn(name)
    found = fault(own, **accepted_arguments(own, given))
    assert difference(found, formula(given), given) > 1e-2
