"""Decides the cost of a failed episode: with which rewards and masks it is trained on.

How often a crashed episode is played again stands in the turn loop (`max_refills`); when failures
end the run, in training/run. Invariant: an episode that did not fail keeps its tokens and rewards.
"""

from training.config import AgentConfig
from workers.rollout.episode import FAILURES, Episode


def apply_failure_policy(episode: Episode, agent: AgentConfig) -> None:
    """Gives an ended episode the rewards and masks that it is trained on with, in place.

    An episode that overflowed gets `agent.overflow_reward` on top. A failed one loses its rewards;
    where its tokens are masked too, nothing of it is trained on.
    """
    if episode.ending == "overflow" and agent.overflow_reward:
        episode.add_reward(agent.overflow_reward)
    if episode.ending not in FAILURES:
        return
    episode.clear_rewards()
    if is_masked(episode.ending, agent):
        for row in episode.rows:
            row.spans = []


def is_masked(ending: str, agent: AgentConfig) -> bool:
    """Returns whether the tokens of an episode that failed so are left out of training.

    `on_failure=mask` masks every failed episode, `refill` one that crashed to the last attempt: a
    timeout may well be the policy's doing, and to leave it out would reward it for that. A failure
    of the engine is never the policy's doing.
    """
    if ending == "engine_error" or agent.on_failure == "mask":
        return True
    return agent.on_failure == "refill" and ending == "env_crash"
