"""Rewards that requests' headers name (X-Reward): paid once, whatever becomes of the request.

    request                                       its header pays the answer before it
    first that says something of that answer      all of it
    the same request again (a retry)              what it says beyond the time before
    any, behind one that was not answered         what it says beyond that one

So what a refused request says stands, and the client that asks again, in the same words or with
less of them, says it anew; it does not earn twice. Different requests that are both answered each
pay what they say: two conversations may go on from one answer.
"""

import hashlib
from dataclasses import dataclass, field


@dataclass(eq=False)
class HeaderRewards:
    """Keeps what headers have said of an episode's turns.

    Attributes:
        by_content: by a digest of what a request asks and the turn that it pays, what it said of
            that last.
        by_number: by a request's number, the turn that it pays and what it said.
        unanswered: by turn, what a request said of it that has got no answer.
    """

    by_content: dict[tuple[bytes, int], float] = field(default_factory=dict)
    by_number: dict[int, tuple[int, float]] = field(default_factory=dict)
    unanswered: dict[int, float] = field(default_factory=dict)

    def owed(self, turn: int, reward: float, *, number: int, content: str) -> float:
        """Returns what a turn is still to be paid.

        Args:
            number: of the request that says so.
            content: what it asks; "": unknown, and like no other's.
        """
        digest = hashlib.blake2b(content.encode(), digest_size=16).digest()
        said = self.unanswered.pop(turn, None)
        if said is None:
            said = self.by_content.get((digest, turn), 0.0) if content else 0.0
        if content:
            self.by_content[digest, turn] = reward
        self.by_number[number] = (turn, reward)
        return reward - said

    def leave_unanswered(self, number: int) -> None:
        """Notes that a request has got no answer, or that nobody took it."""
        if number in self.by_number:
            turn, reward = self.by_number.pop(number)
            self.unanswered[turn] = reward
