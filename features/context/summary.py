"""Summaries: the policy writes what the next context begins with, behind the task.

    task  a0 r0 a1 r1 a2 | request  S        r2 answers a2
    task + S             | a2 r2             with context.keep_turns=1

A summary that cannot be used costs the context what it was to keep: the next one begins with the
task and the last turns alone. The policy so has to live with what it wrote, and an episode goes on
whatever it writes. Invariant: the fault is told in the row's seam, counted, and logged once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from custom.env import Message
from data.warn_once import warn_first
from features.context.due import Due
from features.context.parts import last_part, merged, turn_places, with_text
from features.context.settings import PLACE, ContextSettings
from workers.rollout.history import (
    Deciding,
    Decision,
    HistoryRule,
    NewContext,
    Standing,
    Writing,
    Written,
)

SUMMARY = "summary"
INSTEAD = "the next context begins with the task and the last turns alone"


@dataclass(frozen=True)
class Summarise(HistoryRule):
    """Has the policy summarise a context that is to end, and begins the next with the summary.

    Args:
        reserved: tokens of each row for the request and the summary.
    """

    settings: ContextSettings
    reserved: int = 0

    def next_context(self, standing: Standing) -> Decision | Deciding:
        """Returns None while the context goes on; else asks for a summary and uses it."""
        if not Due(self.settings).is_due(standing) or not turn_places(standing):
            return None
        return self._summarised(standing)

    def _summarised(self, standing: Standing) -> Deciding:
        request: Message = {"role": "user", "content": self.settings.request}
        written = yield Writing(
            [request], self.settings.summary_tokens, SUMMARY, self.settings.train_summaries
        )
        # One turn at least is summarised.
        turns = min(self.settings.keep_turns, len(turn_places(standing)) - 1)
        fault = self._fault_of(written, standing, turns)
        if not fault:
            told = self.settings.summary_text.replace(PLACE, written.text.strip())
            messages = _longest_that_fits(standing, with_text(standing.task, told), turns)
            if messages is not None:
                return NewContext(messages, SUMMARY)
            fault = (
                f"the task, a summary of {written.tokens} tokens and the last reply are more than "
                f"a prompt may have (data.max_prompt_length={standing.max_prompt})"
            )
        kind = re.sub(r"\d+", "", fault)
        warn_first(__name__, kind, f"a context's summary is not used: {fault}; {INSTEAD}")
        messages = _longest_that_fits(standing, standing.task, turns)
        if messages is None:
            messages = merged([*standing.task, *last_part(standing, 0)])
        return NewContext(messages, SUMMARY, fault)

    def _fault_of(self, written: Written, standing: Standing, turns: int) -> str:
        """Says why a summary cannot be used; "": it can."""
        if not written.tokens:
            return (
                "there was no room left to ask for one, in the context or of the episode's tokens "
                "(agent.max_episode_tokens)"
            )
        if not written.text.strip():
            return "it is empty"
        kept = merged([*standing.task, *last_part(standing, turns)])
        whole = [*standing.messages, *standing.reply]
        replaced = standing.count(whole) - standing.count(kept)
        if written.tokens > replaced:
            return f"it has {written.tokens} tokens, more than the {replaced} that it replaces"
        return ""


def _longest_that_fits(
    standing: Standing, beginning: Sequence[Message], turns: int
) -> list[Message] | None:
    """Returns the beginning and as many of the last turns as fit into a prompt; None: none does."""
    for kept in range(turns, -1, -1):
        messages = merged([*beginning, *last_part(standing, kept)])
        if standing.count(messages) <= standing.max_prompt:
            return messages
    return None
