"""Learning rates are compared with the schedule that the run builds, whichever that is."""

from __future__ import annotations

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler

from features.alarms.rules import update
from features.alarms.rules.update import RateRules, schedule
from tests.features.alarms.made_steps import changed, empty_batch, made_run, seen_step
from training.config import OptimConfig, PPOConfig

STEPS = 40
CONFIG = changed(PPOConfig(), "actor_rollout_ref.actor.optim.scheduler", "cosine")
BUILD = update.build_scheduler


def torch_cosine(optimizer: Optimizer, *args: object) -> lr_scheduler.LRScheduler:
    return lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def one_cycle(optimizer: Optimizer, *args: object) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS)


def in_sequence(optimizer: Optimizer, *args: object) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])


def found(rates: list[float], first_step: int = 1) -> list[int]:
    """Lists the steps in which the rule rings."""
    rules = RateRules(made_run(CONFIG))
    steps = []
    for step, rate in enumerate(rates, start=first_step):
        seen = seen_step(empty_batch(), {"actor/lr": rate}, config=CONFIG)
        object.__setattr__(seen, "step", step)
        if list(rules.other_rates(seen)):
            steps.append(step)
    return steps


@pytest.mark.parametrize("build", [BUILD, torch_cosine, one_cycle, in_sequence])
def test_any_schedule_that_a_run_builds_is_silent_and_one_that_is_stepped_twice_rings(
    build: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update, "build_scheduler", build)
    rate_at = schedule(CONFIG.actor_rollout_ref.actor.optim, STEPS)
    assert found([rate_at(number) for number in range(8)]) == []
    assert found([rate_at(2 * number) for number in range(8)]) == list(range(2, 9))
    # The run goes on at its place, or its schedule begins anew.
    assert found([rate_at(number) for number in range(10, 18)], first_step=11) == []
    assert found([rate_at(number) for number in range(8)], first_step=11) == []


@pytest.mark.parametrize("share", [0.1, 3.0])
def test_a_group_with_a_rate_of_its_own_follows_the_schedule_by_its_share(share: float) -> None:
    rate_at = schedule(CONFIG.actor_rollout_ref.actor.optim, STEPS)
    rates = [share * rate_at(number) for number in range(8)]
    assert found(rates) == []
    assert found([*rates[:4], *(10 * rate for rate in rates[4:])]) == [5, 6, 7, 8]


def test_a_rate_before_a_warm_up_has_begun_is_zero() -> None:
    rates = schedule(OptimConfig(lr_warmup_steps=2), STEPS)
    assert [rates(number) for number in range(4)] == [0.0, 5e-7, 1e-6, 1e-6]


def test_a_schedule_draws_nothing() -> None:
    before = torch.random.get_rng_state()
    schedule(OptimConfig(), STEPS)(5)
    assert torch.equal(before, torch.random.get_rng_state())
