"""Decides when environments end a run: they fail too often, or a group's members face other tasks.

What a single failed episode costs is decided elsewhere (workers/rollout/failure_policy.py).
"""

import logging
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.batch.row_groups import rows_by_key

logger = logging.getLogger(__name__)
EpisodeFacts = Mapping[str, Any]
# Steps over which failures are counted.
WATCHED_STEPS = 3
# A group is warned of when it crashes so many times as often as the other groups.
CONSPICUOUS_RATIO = 4
FEWEST_CRASHES = 2


class EnvironmentsFail(RuntimeError):
    """Ends a run whose environments do not give what a run can learn from.

    Names them and the fix.
    """


def by_group(episodes: Sequence[EpisodeFacts]) -> list[list[EpisodeFacts]]:
    """Lists the episodes of each group."""
    groups = rows_by_key(episode["group"] for episode in episodes)
    return [[episodes[number] for number in numbers] for numbers in groups.values()]


def require_same_tasks(episodes: Sequence[EpisodeFacts], names: Sequence[str]) -> None:
    """Raises EnvironmentsFail where a group's members began with different messages.

    They had the same seed, and so must face the same task.
    """
    begins: dict[tuple[int, int], set[str]] = defaultdict(set)
    for episode in episodes:
        if episode["begins"]:
            begins[episode["group"], episode["environment"]].add(episode["begins"])
    different = [key for key, hashes in begins.items() if len(hashes) > 1]
    if different:
        _, environment = different[0]
        raise EnvironmentsFail(
            f"environment {names[environment]}: in {len(different)} of {len(begins)} groups the "
            "members began differently under the same seed, so that their rewards cannot be "
            "compared: have reset(seed) draw from a generator of its own, or use "
            "agent.environment.isolation=process where global generators are drawn from; "
            "agent.allow_different_tasks=true trains all the same"
        )


@dataclass(frozen=True)
class Attempts:
    """Counts attempts at episodes, and those that failed."""

    tried: int
    failed: int


class FailureWatch:
    """Ends a run whose environments fail in more than `limit` of the attempts of three steps.

    Args:
        sources: what errors call each environment.
    """

    def __init__(self, limit: float, sources: Sequence[str] = ()) -> None:
        self.limit = limit
        self.sources = sources
        self._steps: deque[Attempts] = deque(maxlen=WATCHED_STEPS)

    def check(self, episodes: Sequence[EpisodeFacts]) -> None:
        """Counts a step's attempts; raises EnvironmentsFail, with the first error."""
        tried = sum(episode["attempts"] for episode in episodes)
        failures = ("env_crash", "env_timeout")
        ended_well = [episode for episode in episodes if episode["ending"] not in failures]
        self._steps.append(Attempts(tried=tried, failed=tried - len(ended_well)))
        all_tried = sum(step.tried for step in self._steps)
        all_failed = sum(step.failed for step in self._steps)
        if len(self._steps) == WATCHED_STEPS and all_failed > self.limit * all_tried:
            raise EnvironmentsFail(
                f"{all_failed} of {all_tried} attempts of the last three steps failed, above "
                f"agent.max_failure_rate={self.limit:g}; the first of this step: "
                f"{self._first_error(episodes)}"
            )

    def _first_error(self, episodes: Sequence[EpisodeFacts]) -> str:
        """Describes a step's first error: in which environment, what, and a deadline's key."""
        first = next((episode for episode in episodes if episode["error"]), None)
        if first is None:
            return ""
        error = str(first["error"])
        if first["ending"] == "env_timeout":
            error += "; deadlines are agent.step_timeout_s and agent.episode_timeout_s"
        number = first["environment"]
        if number >= len(self.sources):
            return error
        return f"environment {self.sources[number]}: {error}"


class UnscoredWatch:
    """Ends a run whose rows mostly have no score, as models beside the policy do not answer.

    Args:
        limit: share of the episodes of the last three batches that were scored.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._batches: deque[Attempts] = deque(maxlen=WATCHED_STEPS)

    def count(self, *, tried: int, failed: int) -> None:
        """Counts a batch's episodes; raises EnvironmentsFail."""
        self._batches.append(Attempts(tried=tried, failed=failed))
        all_tried = sum(batch.tried for batch in self._batches)
        all_failed = sum(batch.failed for batch in self._batches)
        if len(self._batches) == WATCHED_STEPS and all_failed > self.limit * all_tried:
            raise EnvironmentsFail(
                f"{all_failed} of {all_tried} answers of the last three batches have no score, "
                f"above agent.max_failure_rate={self.limit:g}, as a model of judges.models does "
                "not answer the reward function; the warnings above say why"
            )


class PartsOfBatch:
    """Adds up the episodes of a batch that is scored in parts, until the watch counts it whole.

    A part alone may be a single group, of which chance lets most fail.
    """

    def __init__(self, watch: UnscoredWatch) -> None:
        self.watch = watch
        self._tried = 0
        self._failed = 0

    def count(self, *, tried: int, failed: int) -> None:
        """Adds a part's episodes."""
        self._tried += tried
        self._failed += failed

    def end_batch(self) -> None:
        """Has the watch count the parts so far, if there are any; raises EnvironmentsFail."""
        tried, failed = self._tried, self._failed
        self._tried = 0
        self._failed = 0
        if tried:
            self.watch.count(tried=tried, failed=failed)


def count_crashes(episode: EpisodeFacts) -> int:
    """Counts the attempts that crashed: all before the last one, and that if it crashed too."""
    if episode["ending"] == "env_crash":
        return episode["attempts"]
    return episode["attempts"] - 1


def warn_of_crashing_groups(episodes: Sequence[EpisodeFacts], names: Sequence[str]) -> None:
    """Warns of groups whose members crash while others' do not: an action may be what crashes them.

    Such a crash is played again or masked, and so goes unpunished.
    """
    all_crashes = sum(count_crashes(episode) for episode in episodes)
    all_attempts = sum(episode["attempts"] for episode in episodes)
    for group in by_group(episodes):
        crashes = sum(count_crashes(episode) for episode in group)
        attempts = sum(episode["attempts"] for episode in group)
        other_crashes = all_crashes - crashes
        other_attempts = all_attempts - attempts
        if len(group) == 1 or crashes < FEWEST_CRASHES or other_attempts == 0:
            continue
        # As if one of the others' attempts had crashed where none did.
        rate_elsewhere = max(other_crashes / other_attempts, 1 / other_attempts)
        if crashes / attempts > CONSPICUOUS_RATIO * rate_elsewhere:
            logger.warning(
                "environment %s: group %s crashed in %s of %s attempts, the others in %s of %s. "
                "If its actions are what crashes it, that goes unpunished; agent.on_failure=zero "
                "gives a crash reward 0",
                names[group[0]["environment"]],
                group[0]["group"],
                crashes,
                attempts,
                other_crashes,
                other_attempts,
            )
