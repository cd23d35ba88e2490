"""What the records of episodes have recorded on the ranks: each token of the policy's updates.

With `agent.episodes_keep=0` nothing is recorded.
"""

from features.records.token_record import TokenRecorder
from training.config import PPOConfig
from workers.model.probe import UpdateProbe


def update_probes(config: PPOConfig, role: str) -> list[UpdateProbe]:
    """Makes the policy's probe ("actor"); the critic has none."""
    if role != "actor" or not config.agent.records_episodes:
        return []
    return [TokenRecorder(records_gradients=config.agent.record_gradients)]
