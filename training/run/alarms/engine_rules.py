"""Compares what engine and trainer make of the same tokens: canaries and sampled tokens."""

from collections.abc import Iterator
from dataclasses import dataclass

from training.config import PPOConfig
from training.run.alarms.catalogue import Finding
from training.run.alarms.history import Metrics


@dataclass(frozen=True)
class Limits:
    """Bounds how far engine and trainer may be apart.

    Attributes:
        canary, lag: mean over the canaries' tokens, nats. They are of random tokens, to which
            short types do worst.
        log_probs: mean over sampled tokens, of probabilities.
        turn: mean over the sampled tokens of a row's turn, or of its later turns, of
            probabilities.
        ratio: mean over a micro-batch's tokens, nats.
    """

    canary: float
    lag: float
    log_probs: float
    turn: float
    ratio: float


# With float32 throughout.
EXACT_LIMITS = Limits(canary=0.001, lag=0.00002, log_probs=0.002, turn=0.01, ratio=0.001)
# With a shorter type in either. Here `canary` and `lag` begin at four times what the run's first
# step has, which is noise, but for what is broken from the start.
SHORT_TYPE_LIMITS = Limits(canary=0.25, lag=0.25, log_probs=0.04, turn=0.3, ratio=0.03)
NOISE_FACTOR = 4
LEAST_NOISE = 0.01
# An engine that lags by more of the actor's movement did not follow it, or not at all.
LARGEST_LAG = 0.05
NEARLY_ALL = 0.95


class EngineRules:
    """Watches the engine's weights and log-probs.

    Args:
        config: the run's.
    """

    def __init__(self, config: PPOConfig) -> None:
        policy = config.actor_rollout_ref
        self.rollout = policy.rollout
        self.is_exact = policy.model.dtype == policy.rollout.dtype == "float32"
        self.limits = EXACT_LIMITS if self.is_exact else SHORT_TYPE_LIMITS
        self.canary_limit: float | None = None
        self.lag_limit: float | None = None
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
        difference = metrics.get("canary/difference", 0.0)
        if self.canary_limit is None:
            self.canary_limit = self._begin_at_noise(self.limits.canary, difference)
        if difference > self.canary_limit:
            yield Finding(
                "engine_differs",
                f"engine and actor differ by {difference:.2g} nats a token on the canaries "
                f"(limit {self.canary_limit:.2g})",
            )

    def _check_movement(self, metrics: Metrics) -> Iterator[Finding]:
        """Compares how far the engine's canaries moved in the step with how far the actor's did."""
        moved = metrics.get("canary/actor_moved")
        if moved is None:
            return
        lag = metrics.get("canary/lag", 0.0)
        has_learned = metrics.get("actor/grad_norm", 0.0) > 0 and metrics.get("actor/lr", 0.0) > 0
        # In a short type the least change of a weight moves the actor, and may be rounded away by
        # the engine.
        engine_stood_still = metrics["canary/engine_moved"] == 0 and moved > 0 and has_learned
        if not engine_stood_still and self.lag_limit is None:
            self.lag_limit = self._begin_at_noise(self.limits.lag, lag)
        if engine_stood_still or lag > max(LARGEST_LAG * moved, self.lag_limit or 0.0):
            how = "did not move as the actor did"
            if engine_stood_still or lag > NEARLY_ALL * moved:
                how = "kept its old weights"
            yield Finding(
                "engine_stale",
                f"the engine {how}: the actor's log-probs of the canaries moved by {moved:.2g}, "
                f"the engine's lag by {lag:.2g} nats a token",
            )
        if moved == 0 and has_learned and not metrics.get("actor/skipped_updates"):
            yield Finding(
                "policy_still",
                "an update with a gradient left the policy's log-probs bitwise as they were",
            )

    def _begin_at_noise(self, limit: float, first_value: float) -> float:
        """Chooses a limit by the first value that the run has, at most `limit`."""
        if self.is_exact:
            return limit
        return min(limit, NOISE_FACTOR * first_value + LEAST_NOISE)

    def _check_sampled_tokens(self, metrics: Metrics) -> Iterator[Finding]:
        """Compares log-probs of sampled tokens, and of the two passes over them.

        The engine's are of the distribution that is sampled from, which top_k and top_p change,
        and with older weights of another policy.
        """
        is_filtered = self.rollout.top_k > 0 or self.rollout.top_p < 1
        is_stale = metrics.get("async/staleness_max", 0.0) > 0
        if not is_filtered and not is_stale:
            yield from _above(
                metrics,
                "training/rollout_probs_diff_mean",
                self.limits.log_probs,
                alarm="log_probs_differ",
            )
            yield from _above(
                metrics,
                "training/rollout_turn_diff_max/first",
                self.limits.turn,
                alarm="turn_differs",
                where=" (in first turns)",
            )
            yield from _above(
                metrics,
                "training/rollout_turn_diff_max/later",
                self.limits.turn,
                alarm="turn_differs",
                where=" (in later turns)",
            )
        yield from _above(
            metrics, "actor/first_update_diff", self.limits.ratio, alarm="ratio_not_one"
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


def _above(
    metrics: Metrics, name: str, limit: float, *, alarm: str, where: str = ""
) -> Iterator[Finding]:
    """Finds a metric above its limit; what is not a number is above any."""
    if name in metrics and not metrics[name] <= limit:
        yield Finding(alarm, f"{name}={metrics[name]:.3g}{where} is above {limit:g}")
