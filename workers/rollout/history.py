"""Decides what a conversation's next prompt consists of: the hook by which an episode outlives one
context.

Before each turn but the first, once the environment has answered, an episode asks the run's
`HistoryRule` (`agent.context`). It has three answers:

    None          the context goes on: the reply is joined to the row
    NewContext    the episode goes on in a new row, whose prompt is these messages
    Writing       first the policy writes something, such as a summary, behind its last turn

With a summary S, which is asked for by the request Q and is turn 2:

    row 0    P0 | A0 | E0 | A1 | Q | S
    row 1    P0 S E1 | A3 | E3 | ...

Without a history (`agent.context=keep`) every context goes on, and nothing here is called.
Invariant: a history is a function of what it is shown, without a memory of its own, so that ranks
that share an engine, replays and resumed runs decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from custom.env import Message
from data.loading import load_object
from data.turn_tokens import TurnTokens
from training.features import folder_that_brings, named

if TYPE_CHECKING:
    from training.config import PPOConfig

# `agent.context`, where contexts go on until they are full.
KEEP = "keep"


class HistoryFault(ValueError):
    """Ends the run: a history of the user's raised, or said what cannot be used."""


class Writing(NamedTuple):
    """Has the policy write something behind its last turn, such as a summary.

    Attributes:
        messages: what it is told in place of the environment's reply.
        max_tokens: of what it writes.
        purpose: one word for it, such as "summary".
        is_trained: what it writes is trained on as any turn is; else its mask is 0.
    """

    messages: list[Message]
    max_tokens: int
    purpose: str
    is_trained: bool = True


class Written(NamedTuple):
    """Answers a `Writing`.

    Attributes:
        text: what the policy wrote; "" where there was no room to ask it.
        tokens: that were sampled.
    """

    text: str
    tokens: int


class NewContext(NamedTuple):
    """Goes on in a new row.

    Attributes:
        messages: its prompt.
        reason: one word for what began it, such as "summary".
        fault: a sentence on why these are not the messages that were wanted; "": they are.
    """

    messages: list[Message]
    reason: str
    fault: str = ""


Decision = NewContext | None
Deciding = Generator[Writing, Written, Decision]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Shows a history where an episode stands behind a turn.

    Attributes:
        task: the messages that the episode began with.
        messages: the context up to the policy's last turn.
        reply: what answered that turn, and is still to be read.
        turns: that the policy has taken in this context.
        tokens: of the context's row with the reply joined.
        room: tokens that are left for the next turn with the reply joined; the context is full
            where it is 0 or less.
        turn_tokens: that the next turn is to have room for.
        max_prompt: tokens that the prompt of a new row may have.
        seed: of what is drawn for this context, in [0, 2**31); the same at each of its turns.
        count: counts the tokens of a prompt of these messages.
    """

    task: list[Message]
    messages: list[Message]
    reply: list[Message]
    turns: int
    tokens: int
    room: int
    turn_tokens: int
    max_prompt: int
    seed: int
    count: Callable[[list[Message]], int]

    @property
    def is_full(self) -> bool:
        """Returns whether the next turn may not have the room that it needs."""
        return self.room < self.turn_tokens


class HistoryRule:
    """Decides what the next prompt consists of; by default the context goes on.

    Attributes:
        reserved: tokens of each row that turns leave free, for what `Writing` adds.
    """

    reserved: int = 0

    def next_context(self, standing: Standing) -> Decision | Deciding:
        """Returns None to go on, or the new context; or yields a `Writing` before it returns one.

        Raises:
            HistoryFault: it cannot decide, which ends the run.
        """
        return None


def open_history(config: PPOConfig, tokens: TurnTokens) -> HistoryRule | None:
    """Opens what `agent.context` names; None where contexts go on until they are full.

    Raises:
        HistoryFault: no feature that is here brings it.
    """
    if config.agent.context == KEEP:
        return None
    for feature, place in named("history"):
        history: HistoryRule = load_object(place, f"feature {feature}")(config, tokens)
        return history
    raise HistoryFault(absent_sentence(config.agent.context))


def absent_sentence(context: str) -> str:
    """Says which folder is gone and with it all contexts but those that go on."""
    return (
        f"agent.context={context} is decided by {folder_that_brings('history')}, which is not "
        f"here: put the folder back, or set agent.context={KEEP}"
    )
