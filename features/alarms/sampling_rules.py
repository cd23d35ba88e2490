"""Compares sampled tokens with the policy that they are said to be of: are they too probable?

A token's -log p has the policy's entropy for its mean, so that the sum of their differences wanders
around 0. An engine that samples a sharper distribution than that of the log-probs that it reports
makes it fall. How far chance would let it Bernstein's bound says, with the largest variance that
-log p can have in a vocabulary.
"""

import math
from collections import deque
from collections.abc import Iterator

from data.protocol import DataProto
from features.alarms.catalogue import Finding
from features.alarms.history import Metrics
from training.batch.masked_ops import masked_mean
from training.config import PPOConfig

# Steps that are summed up, at most.
MEMORY = 16
# Nats by which it must be unlikely; the sums are looked at again in every step.
UNLIKELY = 30.0


class SamplingRules:
    """Watches the probabilities of a run's sampled tokens.

    Args:
        config: the run's.
    """

    def __init__(self, config: PPOConfig) -> None:
        rollout = config.actor_rollout_ref.rollout
        algorithm = config.algorithm
        is_filtered = rollout.top_k > 0 or rollout.top_p < 1 or rollout.temperature == 0
        # What is chosen by its reward need not be as probable as all that was sampled.
        is_chosen = (
            algorithm.filter_groups.enable
            or algorithm.use_pf_ppo
            or algorithm.rollout_correction.corrects
        )
        self.is_silent = is_filtered or is_chosen
        # For each step, tokens and the sum of -log p less the entropy, nats.
        self.sums: deque[tuple[float, float]] = deque(maxlen=MEMORY)

    def check(self, batch: DataProto, metrics: Metrics, vocabulary: int) -> Iterator[Finding]:
        """Looks at a step.

        Args:
            vocabulary: tokens that there are.
        """
        fields = batch.batch
        entropy = metrics.get("actor/old_entropy", metrics.get("actor/entropy"))
        log_probs = fields.get("old_log_probs", fields.get("rollout_log_probs"))
        is_stale = metrics.get("async/staleness_max", 0.0) > 0
        if self.is_silent or is_stale or entropy is None or log_probs is None:
            return
        mask = fields["response_mask"]
        tokens = float(mask.sum())
        surprise = -masked_mean(log_probs, mask).item()
        self.sums.append((tokens, tokens * (surprise - entropy)))
        num_tokens = 0.0
        sum_of_differences = 0.0
        for count, differences in reversed(self.sums):
            num_tokens += count
            sum_of_differences += differences
            if nats_of_chance(num_tokens, -sum_of_differences, vocabulary) > UNLIKELY:
                below = -sum_of_differences / num_tokens
                yield Finding(
                    "samples_biased",
                    f"{num_tokens:.0f} sampled tokens are more probable than the policy's entropy "
                    f"lets them be, by {below:.2g} nats a token",
                )
                return


def nats_of_chance(tokens: float, shortfall: float, vocabulary: int) -> float:
    """Returns the nats by which chance alone hardly makes -log p fall so far short of the entropy.

    Args:
        shortfall: the sum over the tokens, nats.
    """
    if shortfall <= 0 or vocabulary < 2:
        return 0.0
    longest = math.log(vocabulary)
    variance = longest**2 / 4 + 1
    return shortfall**2 / 2 / (tokens * variance + shortfall * longest / 3)
