"""What a teacher's context is told of a row: `TeacherRow`.

Invariant: it holds what is known of the row behind its step, and nothing that a function could
change of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from custom.env import Message


class Sibling(NamedTuple):
    """Holds another episode of the same group.

    Attributes:
        answer: what the policy wrote in its last row.
        score: of the episode.
    """

    answer: str
    score: float


@dataclass(frozen=True, kw_only=True)
class TeacherRow:
    """Holds a row whose tokens the teacher is to score.

    Attributes:
        messages: those that the policy's prompt was rendered from.
        answer: what the policy wrote in this row, without what answered it.
        score: of the row's episode, its rewards before any KL term.
        failed: whether that is below `teacher.failed_below`.
        columns: of the batch, by name: those of the dataset's row (its solution, say, in
            `reward_model` or `extra_info`), `task`, and a reward function's further values, such as
            a judge's note, as `reward_info/NAME`.
        texts: that the reset's and the steps' `info` had by name, such as `hint`; the last one of a
            name counts.
        feedback: what the environment said last, which the policy may not have read.
        ending: of the episode, such as done or overflow.
        number: of the row in its episode, which has several where a context began anew.
        siblings: the other episodes of its group, in the order of the batch.
    """

    messages: list[Message]
    answer: str
    score: float
    failed: bool
    columns: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    feedback: str = ""
    ending: str = ""
    number: int = 0
    siblings: tuple[Sibling, ...] = ()
