"""Compares what engine and trainer make of the same tokens: canaries and sampled tokens."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from features.alarms.catalogue import Finding
from features.alarms.history import Metrics
from training.config import PPOConfig


@dataclass
class RunLimit:
    """Bounds a difference by what this run's steps without an alarm have shown.

    Attributes:
        most: the limit of the first step, and the highest one later.
        factor: by which a step may be above the largest difference so far.
        least: what the limit never falls below.
        largest: the largest difference so far.
    """

    most: float
    factor: float
    least: float
    largest: float | None = None

    @property
    def limit(self) -> float:
        """Returns the limit of the next step."""
        if self.largest is None:
            return self.most
        return min(self.most, max(self.least, self.factor * self.largest))

    def is_above(self, value: float) -> bool:
        """Judges a step's difference, and learns from one that is not above; NaN is above any."""
        if not value <= self.limit:
            return True
        self.largest = max(value, self.largest or 0.0)
        return False


def exact_limits() -> dict[str, RunLimit]:
    """Makes the limits for float32 throughout, where 1e-7 is normal."""
    return {
        "canary": RunLimit(most=5e-5, factor=10, least=3e-6),
        "lag": RunLimit(most=2e-5, factor=10, least=1e-6),
        "log_probs": RunLimit(most=2e-5, factor=10, least=1e-6),
        "turn_first": RunLimit(most=2e-4, factor=10, least=5e-6),
        "turn_later": RunLimit(most=2e-4, factor=10, least=5e-6),
        "ratio": RunLimit(most=2e-5, factor=10, least=2e-6),
        "values": RunLimit(most=1e-3, factor=10, least=1e-5),
    }


def short_type_limits() -> dict[str, RunLimit]:
    """Makes the limits for a shorter type in either, whose noise depends on the model."""
    return {
        "canary": RunLimit(most=0.25, factor=4, least=0.01),
        "lag": RunLimit(most=0.25, factor=4, least=0.01),
        "log_probs": RunLimit(most=0.04, factor=4, least=0.005),
        "turn_first": RunLimit(most=0.3, factor=4, least=0.05),
        "turn_later": RunLimit(most=0.3, factor=4, least=0.05),
        "ratio": RunLimit(most=0.03, factor=4, least=0.005),
        # Values are as large as returns are.
        "values": RunLimit(most=math.inf, factor=4, least=0.05),
    }


# An engine that lags by more of the actor's movement in a step did not follow it, or not at all.
LARGEST_LAG = 0.05
NEARLY_ALL = 0.95
# The same of the movement since the run began, which outgrows the noise of short types.
LARGEST_LAG_IN_ALL = 0.5


class EngineRules:
    """Watches the engine's weights and log-probs.

    Args:
        config: the run's.
    """

    def __init__(self, config: PPOConfig) -> None:
        policy = config.actor_rollout_ref
        self.rollout = policy.rollout
        is_exact = policy.model.dtype == policy.rollout.dtype == "float32"
        self.limits = exact_limits() if is_exact else short_type_limits()
        # What the chat template makes of a fixed conversation, as a number; kept by checkpoints.
        self.template: float | None = None

    def check(self, metrics: Metrics) -> Iterator[Finding]:
        """Looks at a step's metrics."""
        yield from self._check_difference(metrics)
        yield from self._check_movement(metrics)
        yield from self._check_sampled_tokens(metrics)
        yield from self._check_template(metrics)

    def _check_difference(self, metrics: Metrics) -> Iterator[Finding]:
        """Compares the engine's canaries with the actor's."""
        yield from self._above(metrics, "canary/difference", "canary", alarm="engine_differs")

    def _check_movement(self, metrics: Metrics) -> Iterator[Finding]:
        """Compares how far the engine's canaries moved with how far the actor's did.

        It does so in the step, and since the run began.
        """
        moved = metrics.get("canary/actor_moved")
        if moved is None:
            return
        lag = metrics.get("canary/lag", 0.0)
        has_learned = metrics.get("actor/grad_norm", 0.0) > 0 and metrics.get("actor/lr", 0.0) > 0
        # In a short type the least change of a weight moves the actor, and may be rounded away by
        # the engine.
        engine_stood_still = metrics["canary/engine_moved"] == 0 and moved > 0 and has_learned
        noise = self.limits["lag"].limit
        is_above_noise = not engine_stood_still and self.limits["lag"].is_above(lag)
        if engine_stood_still or (is_above_noise and lag > LARGEST_LAG * moved):
            how = "did not move as the actor did"
            if engine_stood_still or lag > NEARLY_ALL * moved:
                how = "kept its old weights"
            yield Finding(
                "engine_stale",
                f"the engine {how}: the actor's log-probs of the canaries moved by {moved:.2g}, "
                f"the engine's lag by {lag:.2g} nats a token",
            )
        moved_in_all = metrics.get("canary/actor_moved_in_all", 0.0)
        lag_in_all = metrics.get("canary/lag_in_all", 0.0)
        if lag_in_all > max(LARGEST_LAG_IN_ALL * moved_in_all, noise):
            yield Finding(
                "engine_stale",
                f"since the run began the actor's log-probs of the canaries have moved by "
                f"{moved_in_all:.2g}, and the engine's lag by {lag_in_all:.2g} nats a token",
            )
        if moved == 0 and has_learned and not metrics.get("actor/skipped_updates"):
            yield Finding(
                "policy_still",
                "an update with a gradient left the policy's log-probs bitwise as they were",
            )

    def _check_sampled_tokens(self, metrics: Metrics) -> Iterator[Finding]:
        """Compares log-probs of sampled tokens, and of the two passes over them.

        The engine's are of the distribution that is sampled from, which top_k and top_p change,
        and with older weights of another policy.
        """
        is_filtered = self.rollout.top_k > 0 or self.rollout.top_p < 1
        is_stale = metrics.get("async/staleness_max", 0.0) > 0
        if not is_filtered and not is_stale:
            yield from self._above(
                metrics,
                "training/rollout_probs_diff_mean",
                "log_probs",
                alarm="log_probs_differ",
            )
            yield from self._above(
                metrics,
                "training/rollout_turn_diff_max/first",
                "turn_first",
                alarm="turn_differs",
                where=" (in first turns)",
            )
            yield from self._above(
                metrics,
                "training/rollout_turn_diff_max/later",
                "turn_later",
                alarm="turn_differs",
                where=" (in later turns)",
            )
        yield from self._above(metrics, "actor/first_update_diff", "ratio", alarm="ratio_not_one")
        yield from self._above(metrics, "critic/first_update_diff", "values", alarm="values_differ")

    def _above(
        self, metrics: Metrics, name: str, limit: str, *, alarm: str, where: str = ""
    ) -> Iterator[Finding]:
        """Finds a metric above its limit."""
        if name not in metrics:
            return
        bound = self.limits[limit]
        if bound.is_above(metrics[name]):
            usual = "" if bound.largest is None else f", {bound.largest:.2g} was the most so far"
            yield Finding(
                alarm, f"{name}={metrics[name]:.2g}{where} is above {bound.limit:.2g}{usual}"
            )

    def _check_template(self, metrics: Metrics) -> Iterator[Finding]:
        """Compares the chat template's rendering of a conversation with the run's first one."""
        template = metrics.get("canary/template", self.template)
        if self.template is None:
            self.template = template
        if template != self.template:
            yield Finding(
                "template_changed",
                "the chat template writes the same conversation in another way",
            )
