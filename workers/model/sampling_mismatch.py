"""How far a step's first update is from sampling, where no pass before the update measures it.

The policy is then still the one that sampled, so that what differs is numerics. Where log-probs are
computed before the update, the trainer measures the same (training/step_phases.py).
"""

from collections.abc import Mapping

from torch import Tensor

from training.config import PPOConfig
from training.rollout_mismatch import measure_mismatch
from workers.model.loss_fields import LossFields
from workers.model.probe import GroupCounts, MicroBatch, SummingProbe


class SamplingMismatch(SummingProbe):
    """Compares the policy's log-probs with the engine's (`measure_mismatch`), in the first update.

    Args:
        bypasses: whether the engine's log-probs are the old ones
            (algorithm.rollout_correction.bypass_mode).
    """

    def __init__(self, *, bypasses: bool = False) -> None:
        super().__init__()
        self.bypasses = bypasses

    def before_backward(
        self, micro: MicroBatch, fields: LossFields, outputs: Mapping[str, Tensor], loss: Tensor
    ) -> None:
        """Adds a micro-batch's shares of the means; the first update stands for all."""
        is_measured_before = "old_log_probs" in micro.rows.batch and not self.bypasses
        if self.mini.number > 0 or is_measured_before or "rollout_log_probs" not in fields:
            return
        shares, maxima = measure_mismatch(
            outputs["log_prob"].detach(),
            fields["rollout_log_probs"],
            fields["response_mask"],
            batch_num_tokens=self.mini.counts["batch_num_tokens"],
            turn_ids=fields.get("turn_ids"),
        )
        of_step = {name: share * self.mini.updates for name, share in shares.items()}
        self.sums.add(of_step, self.mini.weight)
        self.sums.maximum(maxima)

    def divide(self, by: GroupCounts) -> None:
        """Makes means over tokens of the sums."""
        self.sums.divide(by.tokens, {})


def update_probes(config: PPOConfig, role: str) -> list[SamplingMismatch]:
    """Makes the policy's probe; the critic has none."""
    if role != "actor":
        return []
    return [SamplingMismatch(bypasses=config.algorithm.rollout_correction.bypass_mode)]
