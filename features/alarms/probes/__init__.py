"""What the alarms have measured on the ranks: the probes of updates, reference and weight syncs.

    losses.py        whether the losses see all tokens, and the first update starts where it should
    gradients.py     where the first gradient points, and whether gradients are all there
    movement.py      which tensors an update leaves as they were, and how far layers move
    optimizer_state.py   whether the optimiser's state is what its last step left
    reference.py     which tensors of the reference move
    canary.py        whether the engine has the policy's weights

With `alarms.mode=off` there are none. Invariant: what is measured is read, and never changed.
"""

from typing import Any

from features.alarms.probes.canary import open_canary
from features.alarms.probes.gradients import (
    GradientAlignment,
    KeptGradients,
    LostGradients,
    RepeatedBackward,
)
from features.alarms.probes.losses import FirstUpdateDifference, LossCounts
from features.alarms.probes.movement import StillTensors
from features.alarms.probes.optimizer_state import OptimizerState
from features.alarms.probes.reference import ReferenceMovement
from features.alarms.settings import AlarmSettings
from training.config import PPOConfig
from workers.model.builder import ModelSpec
from workers.model.probe import ReadProbe, SyncProbe, UpdateProbe


def update_probes(config: PPOConfig, role: str) -> list[UpdateProbe]:
    """Makes the probes of an update of the policy ("actor") or of the critic."""
    if config.section(AlarmSettings).mode == "off":
        return []
    bypasses = config.algorithm.rollout_correction.bypass_mode
    return [
        LossCounts(),
        FirstUpdateDifference(bypasses=bypasses),
        GradientAlignment(),
        KeptGradients(),
        LostGradients(),
        RepeatedBackward(),
        StillTensors(),
        OptimizerState(),
    ]


def read_probes(config: PPOConfig, role: str) -> list[ReadProbe]:
    """Makes the probe of the reference."""
    if config.section(AlarmSettings).mode == "off":
        return []
    return [ReferenceMovement()]


def sync_probes(config: PPOConfig, spec: ModelSpec, engine: Any) -> list[SyncProbe]:
    """Makes the probe of weight syncs; none where the engine cannot score a sequence."""
    if config.section(AlarmSettings).mode == "off":
        return []
    return open_canary(config, spec, engine)
