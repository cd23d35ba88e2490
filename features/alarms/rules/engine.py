"""Compares what engine and trainer make of the same tokens: canaries, sampled tokens, entropy.

A sampled token's -log p has the policy's entropy for its mean, so that the sum of their differences
wanders around 0. An engine that samples a sharper distribution than that of the log-probs that it
reports makes it fall, and a flatter one makes it rise. How far chance would let it fall Bernstein's
bound says, with the variance that -log p was measured to have. How far it may rise is not bounded
by the largest difference, as a token may be as rare as it likes: there the bound is that of sums
divided by their own squares (Delyon, EJP 14, 2009), which is wider.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from features.alarms.finding import Finding
from features.alarms.rule import RulesWithMemory, rule
from features.alarms.seen_step import Metrics, SeenStep
from training.observers import ObservedRun

# An engine that lags by more of the actor's movement in a step did not follow it, or not at all.
LARGEST_LAG = 0.05
NEARLY_ALL = 0.95
# The same of the movement since the run began, which outgrows the noise of short types.
LARGEST_LAG_IN_ALL = 0.5
# Steps whose sampled tokens are summed up, at most.
SUMMED_STEPS = 16
# Nats by which it must be unlikely that chance makes them as probable as they are; the sums are
# looked at again in every step.
UNLIKELY = 30.0


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


class EngineRules(RulesWithMemory):
    """Watches the engine's weights and log-probs."""

    name = "engine"

    def __init__(self, run: ObservedRun) -> None:
        super().__init__(run)
        policy = run.config.actor_rollout_ref
        self.rollout = policy.rollout
        is_exact = policy.model.dtype == policy.rollout.dtype == "float32"
        self.limits = exact_limits() if is_exact else short_type_limits()
        # What the chat template makes of a fixed conversation, as a number; kept by checkpoints.
        self.template: float | None = None

    @rule(
        "engine_differs",
        advice=(
            "the weight sync, rollout.dtype and model.dtype, the engine's own settings "
            "(engine_kwargs)"
        ),
        view="sort=-mismatch",
        of_any_step=True,
        order=180,
    )
    def other_canaries(self, seen: SeenStep) -> Iterator[Finding]:
        """Compares the engine's canaries with the actor's."""
        yield from self._above(seen.metrics, "canary/difference", "canary", alarm="engine_differs")

    @rule(
        "engine_stale",
        advice="the weight sync: did all tensors arrive? Answers since then are another policy's",
        view="sort=-mismatch",
        of_any_step=True,
        order=180,
    )
    @rule(
        "policy_still",
        advice=(
            "the optimiser's parameters, the learning rate and the gradient: the update changed "
            "nothing"
        ),
        view="sort=-advantage",
    )
    def canaries_that_lag(self, seen: SeenStep) -> Iterator[Finding]:
        """Compares how far the engine's canaries moved with how far the actor's did.

        It does so in the step, and since the run began.
        """
        metrics = seen.metrics
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

    @rule(
        "log_probs_differ",
        advice=(
            "temperature, top_k and top_p of the engine, its dtype, the weight sync, the response "
            "mask"
        ),
        view="sort=-mismatch",
        order=180,
    )
    @rule(
        "turn_differs",
        advice=(
            "the tokens between turns: does the trainer read what the engine read? The chat "
            "template, tools"
        ),
        view="sort=-mismatch",
    )
    def other_log_probs(self, seen: SeenStep) -> Iterator[Finding]:
        """Compares the log-probs of sampled tokens.

        The engine's are of the distribution that is sampled from, which top_k and top_p change,
        and with older weights of another policy.
        """
        metrics = seen.metrics
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

    @rule(
        "ratio_not_one",
        advice=(
            "dropout, temperature and masks of the two passes: before the first update they are "
            "one policy"
        ),
        view="sort=-ratio",
        order=180,
    )
    @rule(
        "values_differ",
        advice=(
            "dropout and masks of the critic's two passes, and the order of values: before the "
            "first update they are the same"
        ),
        view="sort=-advantage",
    )
    def other_passes(self, seen: SeenStep) -> Iterator[Finding]:
        """Compares the two passes of policy and critic over sampled tokens."""
        metrics = seen.metrics
        yield from self._above(metrics, "actor/first_update_diff", "ratio", alarm="ratio_not_one")
        yield from self._above(metrics, "critic/first_update_diff", "values", alarm="values_differ")

    @rule(
        "template_changed",
        advice=(
            "the tokenizer and data.apply_chat_template_kwargs: prompts are written in another way"
        ),
        view="sort=-mismatch",
        order=180,
    )
    def changed_template(self, seen: SeenStep) -> Iterator[Finding]:
        """Compares the chat template's rendering of a conversation with the run's first one."""
        template = seen.metrics.get("canary/template", self.template)
        if self.template is None:
            self.template = template
        if template != self.template:
            yield Finding(
                "template_changed",
                "the chat template writes the same conversation in another way",
            )

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

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {"template": self.template}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`."""
        self.template = state["template"]


class SamplingRules(RulesWithMemory):
    """Watches the probabilities of a run's sampled tokens."""

    def __init__(self, run: ObservedRun) -> None:
        super().__init__(run)
        config = run.config
        rollout = config.actor_rollout_ref.rollout
        algorithm = config.algorithm
        is_filtered = rollout.top_k > 0 or rollout.top_p < 1 or rollout.temperature == 0
        # What is chosen by its reward need not be as probable as all that was sampled.
        is_chosen = (
            algorithm.filter_groups.enable
            or algorithm.use_pf_ppo
            or algorithm.rollout_correction.corrects
        )
        # Tokens that there are.
        self.vocabulary = len(run.tokenizer) if run.tokenizer is not None else 0
        self.is_silent = is_filtered or is_chosen
        # For each step: tokens, the sum of -log p less the entropy, and that of its squares.
        self.sums: deque[tuple[float, float, float]] = deque(maxlen=SUMMED_STEPS)

    @rule(
        "samples_biased",
        advice=(
            "the engine's temperature and filters against the log-probs that it reports, which "
            "are those before them, perhaps (logprobs_mode)"
        ),
        view="sort=entropy",
        order=190,
    )
    def biased_samples(self, seen: SeenStep) -> Iterator[Finding]:
        """Finds sampled tokens that are more probable than chance makes them."""
        fields = seen.batch.batch
        metrics = seen.metrics
        entropy = metrics.get("actor/old_entropy", metrics.get("actor/entropy"))
        log_probs = fields.get("old_log_probs", fields.get("rollout_log_probs"))
        is_stale = metrics.get("async/staleness_max", 0.0) > 0
        if self.is_silent or is_stale or entropy is None or log_probs is None:
            return
        mask = fields["response_mask"]
        differences = (-log_probs[mask.bool()].double() - entropy).tolist()
        squares = sum(difference**2 for difference in differences)
        self.sums.append((float(len(differences)), math.fsum(differences), squares))
        num_tokens = 0.0
        sum_of_differences = 0.0
        sum_of_squares = 0.0
        for count, of_differences, of_squares in reversed(self.sums):
            num_tokens += count
            sum_of_differences += of_differences
            sum_of_squares += of_squares
            nats = nats_of_chance(sum_of_differences, sum_of_squares, self.vocabulary)
            if nats > UNLIKELY:
                apart = abs(sum_of_differences) / num_tokens
                how = "less" if sum_of_differences > 0 else "more"
                yield Finding(
                    "samples_biased",
                    f"{num_tokens:.0f} sampled tokens are {how} probable than the policy's entropy "
                    f"lets them be, by {apart:.2g} nats a token",
                )
                return


def nats_of_chance(difference: float, squares: float, vocabulary: int) -> float:
    """Returns the nats by which chance alone hardly brings -log p so far from the entropy.

    Args:
        difference: the sum over the tokens of -log p less the entropy, nats.
        squares: the sum of its squares, which estimates the variance of the sum; where the entropy
            is a mean over tokens, from above.
    """
    if vocabulary < 2:
        return 0.0
    longest = math.log(vocabulary)
    # Rare tokens, which add most to the variance, may be among those that were not drawn yet.
    variance = squares + longest**2
    if difference > 0:
        return difference**2 / 2 / (2 * variance)
    return difference**2 / 2 / (variance - difference * longest / 3)
