"""Rows without a score: the model that was to judge them did not answer.

Invariant: such a row is never taken for one that scored 0 by itself: it is marked in the reward
manager's extra infos, under UNSCORED, until the trainer has treated it as `agent.on_failure` says.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

UNSCORED = "unscored"


@dataclass(frozen=True)
class Unscored:
    """Stands for the result of a row that has none, and says why."""

    error: str


def warn_of_unscored(results: Sequence[Any]) -> int:
    """Counts the rows without a score, and warns of them with the first reason."""
    unscored = [result for result in results if isinstance(result, Unscored)]
    if unscored:
        logger.warning(
            "%d of %d rows have no score; the first: %s",
            len(unscored),
            len(results),
            unscored[0].error,
        )
    return len(unscored)
