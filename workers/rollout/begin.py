"""Says where a branch begins: an episode that goes on from the midst of another one.

    episode    P A0 E0 A1 E1 A2            begun at turn 1, of which state s1 was told
    branch     P A0 E0 | B1 F1 B2          A0 is taken and not sampled; B1 is drawn anew

The turns before are joined as in any episode, from their completions, so that ids, rows and new
contexts are those of the episode. The environment either plays them again, and each of its replies
must be the recorded one, or is put into the state that was kept (`Restore`). Invariant: without a
branch nothing here is read, and no seed changes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from workers.environments.reply import StepReply
from workers.rollout.engine import Completion

# So a branch ends that drew its episode's own turn again, where that needs no continuation.
SAME = "same"
# So a branch ends whose environment answered the turns before it otherwise than the record.
DIFFERS = "differs"
BRANCH_ENDINGS = (SAME, DIFFERS)
MAX_SHOWN_CHARS = 80


class Restore(NamedTuple):
    """Names the function that puts a new agent into a state, and its arguments beside the agent.

    Attributes:
        place: "module:function", see `EnvServer.visit`.
    """

    place: str
    args: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Begin:
    """Holds what a branch begins with.

    Attributes:
        prefix: the completions of the turns before it.
        replies: what the environment said before each turn that it was asked for: to the reset, and
            to those of the prefix.
        restore: puts the environment there; None: it plays the turns again.
        word: of this branch alone, in its seeds of sampling.
        redraws_one: only the first turn's seed has the word; later ones are the episode's.
        own_ids: what the episode sampled in the branch's first turn; a branch that samples the
            same ends as SAME. None: it goes on.
        attempt: of the episode, whose later seeds a redraw shares.
        max_tokens: that the branch samples; None: no bound of its own.
    """

    prefix: Sequence[Completion]
    replies: Sequence[StepReply]
    restore: Restore | None = None
    word: str
    redraws_one: bool = False
    own_ids: Sequence[int] | None = None
    attempt: int = 0
    max_tokens: int | None = None

    @property
    def turn(self) -> int:
        """Returns the number of the first turn that is sampled."""
        return len(self.prefix)

    def word_of(self, turn: int) -> str | None:
        """Returns the word in the seed of a turn; None: the seed is the episode's."""
        if self.redraws_one and turn != self.turn:
            return None
        return self.word

    def left(self, sampled: int) -> int:
        """Counts the tokens that the branch may still sample, of which it has sampled so many."""
        if self.max_tokens is None:
            return sys.maxsize
        return self.max_tokens - sampled

    def difference(self, number: int, reply: StepReply) -> str:
        """Says how a reply differs from the recorded one of that number; "": it does not."""
        recorded = self.replies[number]
        where = "the reset" if number == 0 else f"turn {number - 1}"
        if reply.messages != recorded.messages:
            said = "".join(str(message.get("content", "")) for message in reply.messages)
            return (
                f"played again, {where} was answered otherwise than before: "
                f"{said[:MAX_SHOWN_CHARS]!r}"
            )
        if reply.reward != recorded.reward:
            return f"played again, {where} was paid {reply.reward}, and {recorded.reward} before"
        if reply.done != recorded.done:
            return f"played again, {where} ended the episode, or did not, otherwise than before"
        return ""
