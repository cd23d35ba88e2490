"""An environment whose replies come from a person: `python main.py CONFIG --chat MODEL`.

What the person said is a list of replies, which the episode's record keeps as its task. Invariant:
reset with that task the environment says the same again, so that a chat is replayed as any episode.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from custom.env import BaseEnvironment, Message


@dataclass(frozen=True)
class PersonsReply:
    """Holds what a person says as the environment.

    Attributes:
        text: what the policy reads.
        reward: for the policy's last turn.
        done: the episode ends.
        system: before the first message: the system message; empty: none.
    """

    text: str
    reward: float = 0.0
    done: bool = False
    system: str = ""


class PersonEnvironment(BaseEnvironment):
    """Answers with what a person types, or typed.

    Args:
        ask: waits for the person's next reply; None: only recorded replies are given.
    """

    def __init__(self, ask: Callable[[], PersonsReply] | None = None) -> None:
        super().__init__()
        self.ask = ask
        self.replies: list[PersonsReply] = []
        self.recorded: list[PersonsReply] | None = None

    def reset(
        self, seed: int | None = None, replies: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Message]:
        """Returns the person's first message.

        Args:
            replies: what the person said in an episode that is played again.
        Raises:
            ValueError: there is nobody to ask.
        """
        self.replies = []
        self.recorded = None
        if replies is not None:
            self.recorded = [PersonsReply(**reply) for reply in replies]
        reply = self._next()
        messages = [{"role": "user", "content": reply.text}]
        if reply.system:
            messages.insert(0, {"role": "system", "content": reply.system})
        return messages

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Returns the person's reply to the policy's turn."""
        reply = self._next()
        return reply.text, reply.reward, reply.done, {}

    def _next(self) -> PersonsReply:
        """Returns the next reply, and remembers it."""
        place = len(self.replies)
        if self.recorded is not None:
            ended = PersonsReply("", done=True)
            reply = self.recorded[place] if place < len(self.recorded) else ended
        elif self.ask is None:
            raise ValueError(
                "a person answers only in `python main.py CONFIG --chat MODEL`, or in the replay "
                "of such an episode"
            )
        else:
            reply = self.ask()
        self.replies.append(reply)
        return reply

    def itself(self) -> "PersonEnvironment":
        """Returns this environment: what an AgentSpec makes its agent's of."""
        return self

    @property
    def task(self) -> dict[str, Any]:
        """Returns what `reset` must be given to hear the same again."""
        return {"replies": [asdict(reply) for reply in self.replies]}
