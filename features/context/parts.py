"""Takes a context's messages apart: the task, the turns, and what stays of them.

    task    t0 t1 | a0 r0 | a1 r1 | a2      r2      a: the policy's turns, r: what answered them
                    -------turns-------     reply   the last one

Invariant: what stays is the task and the end of the conversation, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence

from custom.env import Message
from workers.rollout.history import Standing

# Between the texts of users' messages that are made one.
BETWEEN = "\n\n"


def turn_places(standing: Standing) -> list[int]:
    """Lists where the policy's turns stand among the messages, behind the task."""
    begin = len(standing.task)
    return [
        place
        for place, message in enumerate(standing.messages)
        if place >= begin and message["role"] == "assistant"
    ]


def last_part(standing: Standing, turns: int) -> list[Message]:
    """Returns the last turns with what answered them; of 0 turns the last reply alone."""
    places = turn_places(standing)
    if turns == 0 or not places:
        return [without_call(message) for message in standing.reply]
    begin = places[-min(turns, len(places))]
    return [*standing.messages[begin:], *standing.reply]


def without_call(message: Message) -> Message:
    """Returns a tool's result as a user's message: templates refuse one without its call."""
    if message["role"] != "tool":
        return message
    return {"role": "user", "content": message["content"]}


def with_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Returns messages that end with a user's text, in the last of them where that is a user's."""
    return merged([*messages, {"role": "user", "content": text}])


def merged(messages: Sequence[Message]) -> list[Message]:
    """Makes neighbours that are users' messages one: many templates want roles in turn."""
    joined: list[Message] = []
    for message in messages:
        is_plain = message.keys() <= {"role", "content"} and message["role"] == "user"
        if joined and is_plain and joined[-1]["role"] == "user":
            text = BETWEEN.join([joined[-1]["content"], message["content"]])
            joined[-1] = {**joined[-1], "content": text}
        else:
            joined.append(message)
    return joined
