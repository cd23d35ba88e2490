"""Functions of rollout_corr_helper on whole batches; the rest is training.rollout_correction.

Invariant: numbers are those of training.rollout_correction, metrics have its names.
"""

from typing import Any

from torch import Tensor

from data.protocol import DataProto
from features.verl.config import RolloutCorrectionConfig
from training import config as sections
from training import rollout_correction
from training.core_algos.offpolicy_metrics import Metrics, compute_offpolicy_metrics
from training.rollout_correction import apply_correction


def compute_rollout_correction_and_add_to_batch(
    batch: DataProto, rollout_corr_config: Any
) -> tuple[DataProto, Metrics]:
    """Weighs and rejects the batch's tokens, in place; see `apply_correction`.

    Args:
        rollout_corr_config: a RolloutCorrectionConfig, or a mapping with its fields.
    Returns: the batch, and metrics as `rollout_corr/NAME`.
    """
    config = rollout_corr_config
    if not isinstance(config, sections.RolloutCorrectionConfig):
        # verl reads a mapping without rollout_is as one that weighs nothing.
        config = RolloutCorrectionConfig(**{"rollout_is": None, **config})
    return batch, apply_correction(batch, config)


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> Metrics:
    """Measures how far the policy is from what sampled, as `rollout_corr/NAME`."""
    metrics = compute_offpolicy_metrics(log_prob, rollout_log_prob, response_mask)
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def __getattr__(name: str) -> Any:
    """Returns what training.rollout_correction has."""
    return getattr(rollout_correction, name)
