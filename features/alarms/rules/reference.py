"""Finds a reference policy that is not the one that the run began with."""

from __future__ import annotations

from collections.abc import Iterator

from data.protocol import DataProto
from features.alarms.finding import Finding
from features.alarms.rule import RulesWithMemory, rule
from features.alarms.seen_step import Metrics, SeenStep
from training.batch.masked_ops import masked_mean
from training.observers import ObservedRun

# Nats a token by which policy and reference may differ before the first update: in float32
# throughout, and in a shorter type.
EXACT_NOISE = 2e-4
SHORT_TYPE_NOISE = 0.1
# A policy that has moved further is no longer its reference.
FAR_ENOUGH = 1e-3


class ReferenceRules(RulesWithMemory):
    """Watches the reference."""

    def __init__(self, run: ObservedRun) -> None:
        super().__init__(run)
        policy = run.config.actor_rollout_ref
        self.is_another_model = policy.ref.model.path is not None
        is_exact = policy.model.dtype == "float32"
        self.noise = EXACT_NOISE if is_exact else SHORT_TYPE_NOISE
        # The sum of the policy's movements, nats a token of the canaries.
        self.moved = 0.0

    @rule(
        "reference_moves",
        advice="what else writes the reference's weights, and which model it is",
        view="sort=-kl",
        of_any_step=True,
        order=200,
    )
    @rule(
        "reference_differs",
        advice="ref.model and its dtype: before the first update it is the policy",
        view="sort=-kl",
    )
    def other_reference(self, seen: SeenStep) -> Iterator[Finding]:
        """Looks at a step; the policy's movement counts from the next one on."""
        batch = seen.batch
        metrics = seen.metrics
        moved = self.moved
        self.moved += metrics.get("canary/actor_moved", 0.0)
        count = batch.meta_info.get("ref_tensors_moved", 0)
        if count:
            yield Finding(
                "reference_moves", f"{count} tensors of the reference are not what they were"
            )
        apart = self._distance(batch, metrics)
        if apart is None or self.is_another_model:
            return
        if seen.step == 1 and not apart <= self.noise:
            yield Finding(
                "reference_differs",
                f"before the first update the reference is {apart:.2g} nats a token from the "
                "policy",
            )
        if apart == 0 and moved > FAR_ENOUGH:
            yield Finding(
                "reference_moves",
                f"the policy has moved by {moved:.2g} nats a token, and the reference is still "
                "equal to it",
            )

    def _distance(self, batch: DataProto, metrics: Metrics) -> float | None:
        """Measures policy and reference before the step's update, nats a token."""
        reference = batch.batch.get("ref_log_prob")
        if reference is None:
            return None
        own = batch.batch.get("old_log_probs")
        if own is None:
            # Without log-probs of its own a step is a single update, whose KL is that before it.
            return abs(metrics["actor/kl_loss"]) if "actor/kl_loss" in metrics else None
        return masked_mean((own - reference).abs(), batch.batch["response_mask"]).item()
