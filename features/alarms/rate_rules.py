"""Compares learning rates with the schedule that the configuration asks for."""

import math
from collections import Counter
from collections.abc import Callable, Iterator

import torch

from features.alarms.catalogue import Finding
from features.alarms.history import Metrics
from training.config import OptimConfig, PPOConfig
from workers.model.optimizer import build_scheduler

TOLERANCE = 1e-5


class RateRules:
    """Watches the learning rates of policy and critic.

    Args:
        config: the run's.
        total_steps: of the run, over which schedules go; None: not known, and nothing is watched.
    """

    def __init__(self, config: PPOConfig, total_steps: int | None) -> None:
        self.schedules: dict[str, Callable[[int], float]] = {}
        self.warmup = {"actor": config.trainer.critic_warmup, "critic": 0}
        # Updates that this process has seen.
        self.seen: Counter[str] = Counter()
        if total_steps is None:
            return
        sections = {
            "actor": config.actor_rollout_ref.actor.optim,
            "critic": config.critic.optim,
        }
        for model, optim in sections.items():
            steps = max(total_steps - self.warmup[model], 1)
            self.schedules[model] = schedule(optim, steps)

    def check(self, metrics: Metrics, step: int) -> Iterator[Finding]:
        """Looks at a step's rates; a schedule may have begun anew with this process."""
        for model, rate_at in self.schedules.items():
            rate = metrics.get(f"{model}/lr")
            if rate is None:
                continue
            planned = rate_at(step - 1 - self.warmup[model])
            anew = rate_at(self.seen[model])
            self.seen[model] += 1
            if not any(math.isclose(rate, right, rel_tol=TOLERANCE) for right in (planned, anew)):
                yield Finding(
                    "rate_differs",
                    f"{model}/lr is {rate:.4g}, and its schedule says {planned:.4g} in this step",
                )


def schedule(optim: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Makes the function of an update's number, from 0 on, that gives its learning rate."""
    parameter = torch.zeros(1, requires_grad=True)
    scheduler = build_scheduler(torch.optim.SGD([parameter], lr=optim.lr), optim, total_steps)
    (factor,) = scheduler.lr_lambdas
    return lambda number: optim.lr * factor(number)
