"""A conversation as a chat template renders it: grows turn by turn, for the same cost each.

Messages are marked (data/chat_templates.py) and looked at once, as they come; the last rendering is
kept, and a turn compared with it. Where the template's source proves that what a turn adds follows
from the first messages and the last (data/template_window.py), those between are left out of what
is rendered. Invariant: a join is what the whole conversation's renderings give.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from data.chat_templates import Message, Messages
from data.template_window import Window

if TYPE_CHECKING:
    from data.turn_tokens import TurnTokens

Tools = Sequence[dict[str, Any]] | None

# It stands for a turn's text where a rendering must not depend on it; plain letters, which no
# template changes.
PLACEHOLDER = "textofthisturn"
# So many messages more than the window are rendered before it is moved.
SLACK = 8


class TemplateRefusal(ValueError):
    """Reports that the chat template does not take a conversation: its roles, order or content."""


class Join(NamedTuple):
    """Describes how a conversation goes on behind a sampled turn.

    Attributes:
        token_ids: to append behind the sampled ids, none of them sampled; empty where the history
            is rewritten.
        rewritten: None, or the ids of the whole new prompt, with which a new row starts.
    """

    token_ids: list[int]
    rewritten: list[int] | None = None


class MarkedTools(NamedTuple):
    """Holds tools' schemas, marked; `written` has every text of theirs."""

    marked: Tools
    written: str


class Conversation:
    """Holds one conversation, and joins the turns that are sampled in it.

    Args:
        turns: of the policy's tokenizer and template.
        messages: the first ones.
    """

    def __init__(self, turns: "TurnTokens", messages: Messages, tools: Tools = None) -> None:
        self._turns = turns
        known_tools = turns.marked_tools(tools)
        self._tools = known_tools.marked
        self._messages = turns.marked(turns.foldable(messages))
        # The rendered messages: all, or those of the window.
        self._shown = list(self._messages)
        self._leaves_out = False
        self._window: Window | None = turns.window(tools)
        self._rendered = turns.render_marked(self._shown, self._tools)
        self._placeholder = PLACEHOLDER
        self._avoid(known_tools.written)
        self._avoid(str(self._messages))

    def prompt(self) -> list[int]:
        """Returns the ids that the model is asked to continue: of all so far."""
        self._show_all()
        return self._turns.encode(self._rendered)

    def join(self, sampled_ids: Sequence[int], new_messages: Messages) -> Join:
        """Adds a sampled turn and what answers it; returns what follows the turn's ids.

        Args:
            sampled_ids: the turn as sampled, with or without the end-of-turn token.
            new_messages: the environment's reply.
        The history counts as rewritten unless the new rendering is the prompt's text, then the
        sampled text, then what stands behind any assistant's turn; white space does not count,
        because templates strip turns.
        """
        turns = self._turns
        text = turns.text(sampled_ids)
        answer, *reply = turns.marked([{"role": "assistant", "content": text}, *new_messages])
        self._avoid(str(reply))
        self._move_window()
        closing = None
        if self._leaves_out:
            closing = self._closing_of_window(answer, reply)
        if closing is None:
            self._show_all()
            closing = self._closing(answer, reply)
        self._messages += [answer, *reply]
        self._avoid(answer["content"])
        if closing is None:
            return Join([], rewritten=turns.encode(self._rendered))
        return Join(turns.without_sampled_end(turns.encode(closing), list(sampled_ids)))

    def _closing_of_window(self, answer: Message, reply: Sequence[Message]) -> str | None:
        """Does as `_closing`; None, and nothing added, where all messages must be looked at."""
        shown = self._shown
        try:
            closing = self._closing(answer, reply)
        # The template may need the messages that are left out.
        except TemplateRefusal:
            closing = None
        if closing is None:
            self._shown = shown
        return closing

    def _closing(self, answer: Message, reply: Sequence[Message]) -> str | None:
        """Adds an answer and its reply to what is shown, and renders it.

        Returns:
            What the template writes behind the answer; None where it does not just continue the
            last rendering.
        """
        before = self._rendered.rstrip()
        any_answer = {"role": "assistant", "content": self._placeholder}
        with_any_answer = [*self._shown, any_answer, *reply]
        self._shown = [*self._shown, answer, *reply]
        self._rendered = self._turns.render_marked(self._shown, self._tools)
        pieces = self._turns.render_marked(with_any_answer, self._tools).split(self._placeholder)
        if len(pieces) != 2:
            return None
        closing = pieces[1]
        is_continued = consists_of(self._rendered, before, answer["content"], closing)
        return closing if is_continued else None

    def _avoid(self, written: str) -> None:
        """Makes the placeholder one that is not in what was written."""
        while self._placeholder in written:
            self._placeholder += "x"

    def _move_window(self) -> None:
        """Stops rendering messages that the window does not show, once these are many."""
        if self._window is None:
            return
        first, last = self._window
        between = len(self._shown) - first - last
        if between < SLACK:
            return
        shown = [*self._shown[:first], *self._shown[first + between - between % 2 :]]
        try:
            self._rendered = self._turns.render_marked(shown, self._tools)
        except TemplateRefusal:
            self._window = None
            return
        self._shown = shown
        self._leaves_out = True

    def _show_all(self) -> None:
        """Renders the whole conversation, as it was before the turn at hand."""
        if self._leaves_out:
            self._leaves_out = False
            self._shown = list(self._messages)
            self._rendered = self._turns.render_marked(self._shown, self._tools)


def consists_of(rendered: str, before: str, text: str, closing: str) -> bool:
    """Checks whether rendered is before + text + closing, white space around and in it aside."""
    middle = len(rendered) - len(closing)
    if middle < len(before) or not (rendered.startswith(before) and rendered.endswith(closing)):
        return False
    return squashed(rendered[len(before) : middle]) == squashed(text)


def squashed(text: str) -> str:
    """Drops all white space."""
    return "".join(text.split())
