"""The settings of contexts: when a new one begins, and what of the old one stays."""

from collections.abc import Iterator
from dataclasses import field
from typing import Any

from training.config.section import NonNegativeInt, PositiveInt, Section

# What stands in `context.request` of a run that sets none.
REQUEST = (
    "The conversation is about to be cut. Write a summary of all that you need to go on: what the "
    "task is, what has happened, what you have found out, what is still to do."
)
SUMMARY_TEXT = "Summary of the conversation so far:\n{summary}"
# In `context.summary_text`, where the summary stands.
PLACE = "{summary}"


class ContextSettings(Section):
    """Says when a new context begins, and what of the old one stays; agent.context says how."""

    #: tokens of a context, its prompt and the next reply included, past which a new one begins;
    #: null = only where the next turn may not fit
    after_tokens: PositiveInt | None = None
    #: turns of a context after which a new one begins; null = turns do not count
    after_turns: PositiveInt | None = None
    #: the number is drawn for each context, from after_turns up to this one; null = it is always
    #: after_turns
    most_turns: PositiveInt | None = None
    #: the last turns, with their replies, that stay as they are
    keep_turns: NonNegativeInt = 1
    #: drop_tool_results: stands in the place of what was left out
    dropped_text: str = "[left out]"
    #: drop_thinking: what thinking begins and ends with
    thinking: tuple[str, ...] = ("<think>", "</think>")
    request: str = REQUEST  #: summarise: what the policy is told to write
    #: summarise: how the next context tells the summary, where {summary} stands
    summary_text: str = SUMMARY_TEXT
    summary_tokens: PositiveInt = 512  #: summarise: the most that a summary may have
    #: summarise: summaries are trained on as any turn is; otherwise their mask is 0
    train_summaries: bool = True
    #: FILE.py:CLASS: its arguments
    kwargs: dict[str, Any] = field(default_factory=dict)

    def problems(self) -> Iterator[str]:
        """Yields what is wrong with bounds and texts."""
        least, most = self.after_turns, self.most_turns
        if most is not None and (least is None or most < least):
            yield (
                f"context.most_turns={most} is the upper bound of context.after_turns={least}: set "
                "both, the upper one no smaller than the lower"
            )
        if len(self.thinking) != 2 or not all(self.thinking):
            yield (
                f"context.thinking={list(self.thinking)} must be two texts, what thinking begins "
                "and ends with, such as [<think>, </think>]"
            )
        if not self.request.strip():
            yield "context.request is empty: say what the policy is to write"
        if PLACE not in self.summary_text:
            yield f"context.summary_text={self.summary_text!r} must have {PLACE} where it stands"
