"""What the records of episodes have recorded on the ranks: each token of the policy's updates.

With `records.keep_gib=0` nothing is recorded.
"""

from features.records.settings import RecordsSettings
from features.records.token_record import TokenRecorder
from training.config import PPOConfig
from workers.model.probe import UpdateProbe


def update_probes(config: PPOConfig, role: str) -> list[UpdateProbe]:
    """Makes the policy's probe ("actor"); the critic has none."""
    settings = config.section(RecordsSettings)
    if role != "actor" or not settings.is_on:
        return []
    return [TokenRecorder(records_gradients=settings.gradients)]
