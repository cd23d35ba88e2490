"""Contexts that are cut without asking the policy: what is left out is gone.

Invariant: a context that would not change by the cut goes on; it ends where it is full.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from custom.env import Message
from features.context.due import Due
from features.context.parts import last_part, merged, turn_places
from features.context.settings import ContextSettings
from workers.rollout.history import Decision, HistoryRule, NewContext, Standing


@dataclass(frozen=True)
class ContextCut(HistoryRule, ABC):
    """Begins a new context of what a mode leaves of the old one, once that is due."""

    settings: ContextSettings
    reason: str

    def next_context(self, standing: Standing) -> Decision:
        """Returns the shorter context that fits with most turns left as they are; None: none."""
        if not Due(self.settings).is_due(standing):
            return None
        whole = [*standing.messages, *standing.reply]
        most = min(self.settings.keep_turns, len(turn_places(standing)))
        for turns in range(most, -1, -1):
            messages = self.shortened(standing, turns)
            changes = messages != whole
            if changes and standing.count(messages) <= standing.max_prompt:
                return NewContext(messages, self.reason)
            # Only a full context gives up what is to stay.
            if not changes and not standing.is_full:
                return None
        return None

    @abstractmethod
    def shortened(self, standing: Standing, turns: int) -> list[Message]:
        """Returns the context with so many last turns as they are."""


class LastTurns(ContextCut):
    """Leaves the task and the last turns."""

    def shortened(self, standing: Standing, turns: int) -> list[Message]:
        """Returns the context with so many last turns as they are."""
        return merged([*standing.task, *last_part(standing, turns)])


class DropToolResults(ContextCut):
    """Leaves all turns, and puts a text in the place of what answered the earlier ones."""

    def shortened(self, standing: Standing, turns: int) -> list[Message]:
        """Returns the context with so many last turns as they are."""
        end = _first_kept(standing, turns)
        messages = []
        for place, message in enumerate(standing.messages):
            is_reply = message["role"] != "assistant" and place >= len(standing.task)
            if is_reply and place < end:
                message = {**message, "content": self.settings.dropped_text}
            messages.append(message)
        return [*messages, *standing.reply]


class DropThinking(ContextCut):
    """Leaves all turns, without the thinking of the earlier ones."""

    def shortened(self, standing: Standing, turns: int) -> list[Message]:
        """Returns the context with so many last turns as they are."""
        end = _first_kept(standing, turns)
        messages = []
        for place, message in enumerate(standing.messages):
            if message["role"] == "assistant" and len(standing.task) <= place < end:
                message = {**message, "content": self._without_thinking(message["content"])}
            messages.append(message)
        return [*messages, *standing.reply]

    def _without_thinking(self, text: str) -> str:
        """Returns what stands before the first thinking and behind the last.

        A prompt may have begun the thinking, so that the turn only ends it.
        """
        begin, end = self.settings.thinking
        before, found, behind = text.rpartition(end)
        if not found:
            # It never ends where the turn was cut.
            return text.partition(begin)[0].rstrip()
        said_first = before.partition(begin)[0] if begin in before else ""
        return f"{said_first}{behind}".strip()


def _first_kept(standing: Standing, turns: int) -> int:
    """Returns where the last turns begin among the messages."""
    places = turn_places(standing)
    if turns == 0 or not places:
        return len(standing.messages)
    return places[-min(turns, len(places))]
