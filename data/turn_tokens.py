"""Joins turns in token space: what the policy sampled stays as ids, the rest is tokenised.

    row of a two-turn episode      prompt | sampled 0 | joined 0 | sampled 1
    response_mask                           1 … 1       0 … 0      1 … 1

`joined` is the chat template's own text behind an assistant's turn (its end marker, where the model
did not sample it), the new messages and the next generation prompt, tokenised by itself.

`TurnTokens` is a tokenizer under its chat template; a `Conversation` grows turn by turn, for the
same cost each. Messages are marked (data/chat_templates.py) and looked at once, as they come; the
last rendering is kept, and a turn compared with it. Where the template's source proves that what a
turn adds follows from the first messages and the last (data/template_window.py), those between are
left out of what is rendered.

Invariants: sampled ids are never made again from text. Where a template renders the earlier turns
differently once the conversation goes on (Qwen3 drops thinking, Mistral moves the tools), nothing
can be joined: the whole prompt, as the template now has it, starts a new row. A join is what the
whole conversation's renderings give.
"""

from __future__ import annotations

import bisect
import copy
import logging
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

from jinja2 import TemplateError

from data.chat_templates import CHATML_TEMPLATE as CHATML_TEMPLATE
from data.chat_templates import (
    MARK,
    Message,
    Messages,
    Tokenizer,
    encode_rendered,
    mark_specials,
    render_chat,
    require_template,
    special_texts,
)
from data.chat_templates import Processor as Processor
from data.chat_templates import Prompt as Prompt
from data.chat_templates import as_messages as as_messages
from data.chat_templates import encode_chat as encode_chat
from data.chat_templates import pad_token_id as pad_token_id
from data.template_window import Window, window_of
from data.turn_ends import TurnEnds, common_length

logger = logging.getLogger(__name__)

Tools = Sequence[dict[str, Any]] | None

# It stands for a turn's text where a rendering must not depend on it; plain letters, which no
# template changes.
PLACEHOLDER = "textofthisturn"
# So many messages more than the window are rendered before it is moved.
SLACK = 8
# The texts whose ids are remembered: how many, and of how many characters at most.
NUM_REMEMBERED = 512
REMEMBERED_CHARS = 4096


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


class TurnReader(Protocol):
    """Reads a sampled turn's thinking and calls, in the form of a family of models.

    Attributes:
        read_markers: texts of special tokens that are part of what it reads.
    """

    @property
    def read_markers(self) -> frozenset[str]: ...

    def as_message(self, text: str, tools: Tools) -> dict[str, Any] | None:
        """Returns a turn as a message in its parts; None: the template takes it as it stands."""

    def reads_alike(self, sampled: str, rendered: str) -> bool:
        """Checks whether a rendering says what was sampled, in whatever spelling."""


class MarkedTools(NamedTuple):
    """Holds tools' schemas, marked; `written` has every text of theirs."""

    marked: Tools
    written: str


def fold_system_message(messages: Messages) -> list[Message]:
    """Puts the system message's text in front of the first user message.

    It is for templates that refuse the role:

    `[system "Be brief.", user "2 + 2?"]` becomes `[user "Be brief.\\n\\n2 + 2?"]`. Without a user
    message behind it, the system message becomes one.
    """
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    system, *rest = messages
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [{**system, "role": "user"}, *rest]


class TurnTokens:
    """Turns conversations into token ids, and ids into text, under one tokenizer's chat template.

    A system message that the template refuses is folded into the first user message, in every
    method.

    Args:
        template_kwargs: variables of the template, such as `enable_thinking`.
        eos_token_ids: the ids at which sampling stops.
        reader: reads a turn's thinking and calls; None: turns are rendered as they stand.
    Raises: TemplateRefusal, from every method that renders, where the template refuses a
        conversation.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template_kwargs: dict[str, Any],
        eos_token_ids: Sequence[int],
        reader: TurnReader | None = None,
    ) -> None:
        require_template(tokenizer, template_kwargs)
        self.tokenizer = tokenizer
        self.reader = reader
        self.name = tokenizer.name_or_path
        self.template_kwargs = dict(template_kwargs)
        self.eos_token_ids = frozenset(eos_token_ids)
        self._known_tools: dict[str, MarkedTools] = {}
        self._remembered_ids = lru_cache(NUM_REMEMBERED)(self._encode_anew)

    def prompt(self, messages: Messages, tools: Tools = None) -> list[int]:
        """Returns the ids that the model is asked to continue.

        All messages and the generation prompt.
        """
        return self.encode(self.rendered(messages, tools))

    def text(self, token_ids: Sequence[int]) -> str:
        """Decodes a sampled turn as its environment reads it.

        Left out are the ids that stop sampling, the tokenizer's named special tokens (bos, eos,
        pad, …) and the special tokens that the template writes itself around turns. Other markers
        stay, special or not: `<tool_call>`, `[TOOL_CALLS]` and `<think>` are for parsers. A MARK is
        left out too, as the template would not render it.
        """
        read_ids = [token_id for token_id in token_ids if token_id not in self._silent_ids]
        return self.decode(read_ids).replace(MARK, "")

    def join(
        self,
        messages: Messages,
        sampled_ids: Sequence[int],
        new_messages: Messages,
        tools: Tools = None,
    ) -> Join:
        """Returns what follows a sampled turn, up to the next generation prompt.

        Args:
            messages: the conversation before the sampled turn.
            sampled_ids: the turn as sampled, with or without the end-of-turn token.
            new_messages: the environment's reply.
        Of a conversation that goes on, `conversation` keeps what the next join needs.
        """
        return self.conversation(messages, tools).join(sampled_ids, new_messages)

    def conversation(self, messages: Messages, tools: Tools = None) -> Conversation:
        """Begins a conversation with these messages, which then grows by joins."""
        return Conversation(self, messages, tools)

    def history(self, messages: Messages, tools: Tools = None) -> Conversation:
        """Begins a conversation with messages of which some are turns that the policy sampled.

        Each of these is rendered in its parts where the template takes it so, else as it stands,
        else without a special token.
        """
        as_read = [self._as_read(message, tools) for message in messages]
        for form in (as_read, messages):
            try:
                return self.conversation(form, tools)
            except TemplateRefusal:
                continue
        return self.conversation([self.spelt(message) for message in messages], tools)

    def _as_read(self, message: Message, tools: Tools) -> Message:
        """Returns a turn of the policy's as the reader reads it; other messages as they are."""
        if self.reader is None or message.get("role") != "assistant":
            return message
        return self.reader.as_message(message["content"], tools) or message

    def read_by(self, reader: TurnReader | None) -> TurnTokens:
        """Returns the same with another reader of turns."""
        return TurnTokens(
            self.tokenizer,
            template_kwargs=self.template_kwargs,
            eos_token_ids=sorted(self.eos_token_ids),
            reader=reader,
        )

    # Methods for those who look at the template.

    @property
    def template_source(self) -> str:
        """Returns the template's own text."""
        template = self.template_kwargs.get("chat_template")
        if template is None and self.tokenizer.chat_template is None:
            return CHATML_TEMPLATE
        return str(self.tokenizer.get_chat_template(template))

    @cached_property
    def stop_texts(self) -> frozenset[str]:
        """Holds the texts of the tokens that stop sampling."""
        return frozenset(self.decode([token_id]) for token_id in self.eos_token_ids)

    def written_turn(self, messages: Messages, answer: Message, tools: Tools = None) -> str:
        """Returns what the template writes for an assistant's message, its end included."""
        before = self.rendered(messages, tools).rstrip()
        after = self.rendered([*messages, answer], tools, add_generation_prompt=False)
        if after.startswith(before):
            return after[len(before) :]
        # The prompt begins the turn otherwise, such as with thinking.
        return after[_common_text(before, after) :]

    @cached_property
    def ends(self) -> TurnEnds:
        """Holds the tokens by which the template ends a turn."""
        asked = [_user("Hello")]

        def closing_before(reply: Messages) -> str | None:
            return self.closing(asked, reply, None, add_generation_prompt=False)

        return TurnEnds(closing_before, encode=self.encode, eos_token_ids=self.eos_token_ids)

    # Methods for a program's requests, which are whole conversations.

    def rendered(
        self, messages: Messages, tools: Tools = None, *, add_generation_prompt: bool = True
    ) -> str:
        """Returns the text of `prompt`, whose special tokens in contents are marked."""
        marked = self.marked(self.foldable(messages))
        return self._render_as_is(marked, self.marked_tools(tools).marked, add_generation_prompt)

    def as_rendered(self, text: str) -> str:
        """Returns a sampled turn's text as `rendered` has it: marked.

        One that the template takes in its parts is spelt as the template spells it.
        """
        in_parts = self.in_parts(text, None)
        if in_parts is not None:
            written = self._written_in_parts(in_parts)
            if self.says_alike(text, written):
                ends = [written.find(stop) for stop in self.stop_texts if stop in written]
                return written[: min(ends, default=len(written))].rstrip()
        return self.marked([_assistant(text)])[0]["content"]

    def _written_in_parts(self, answer: Message) -> str:
        """Returns what the template writes for a turn in its parts; "" where it refuses it."""
        try:
            return self.written_turn([_user("Hello")], answer)
        except TemplateRefusal:
            return ""

    def following(self, text: str, sampled_ids: Sequence[int]) -> list[int] | None:
        """Returns the ids that follow a sampled turn, where `text` is rendered behind its text.

        None where nothing follows, or where the text goes on inside of a turn that has ended.
        """
        if not text.strip():
            return None
        for rest in (text, text.lstrip()):
            ids = self.encode(rest)
            if self.ends.ends_otherwise(ids, sampled_ids):
                return None
            is_end = ids[0] in self.ends.turn_ends
            if self.reader is not None and ids[0] in self.eos_token_ids:
                is_end = True
            if common_length(ids, self.ends.end_ids) or is_end:
                return self.ends.without_sampled(ids, list(sampled_ids))
        # The stop token, or the newline that some templates have behind it.
        has_ended = not self.eos_token_ids.isdisjoint(sampled_ids[-2:])
        return None if has_ended else self.encode(text)

    def length_up_to(self, sampled_ids: Sequence[int], stops: Sequence[str]) -> int:
        """Counts the sampled ids up to the one that completes the first of the stop strings."""

        def has_stop(length: int) -> bool:
            text = self.text(sampled_ids[:length])
            return any(stop in text for stop in stops)

        if not stops or not has_stop(len(sampled_ids)):
            return len(sampled_ids)
        # A text that holds a stop string holds it ever after.
        return bisect.bisect_left(range(len(sampled_ids)), True, key=has_stop)

    # Methods by which a conversation uses the template and the tokenizer.

    def foldable(self, messages: Messages) -> Messages:
        """Folds the system message where the template refuses it."""
        if messages and messages[0]["role"] == "system" and not self.accepts_system:
            return fold_system_message(messages)
        return messages

    def marked(self, messages: Messages) -> list[Message]:
        """Marks the special tokens that messages spell.

        The policy's turns keep those that it may have sampled for its environment to read, such as
        `[TOOL_CALLS]`.
        """
        marked = []
        for message in messages:
            texts = self.special_texts
            if message.get("role") == "assistant":
                texts = self._silent_texts
            marked.append(mark_specials(message, texts))
        return marked

    def spelt(self, message: Message) -> Message:
        """Marks every special token that a message spells, those of the policy's turns too."""
        marked: Message = mark_specials(message, self.special_texts)
        return marked

    def marked_tools(self, tools: Tools) -> MarkedTools:
        """Marks the special tokens that tools' schemas spell; equal schemas are marked once."""
        # A program sends its tools anew with every request.
        text = str(tools)
        known = self._known_tools.get(text)
        if known is None:
            marked = mark_specials(tools, self.special_texts)
            known = MarkedTools(marked, written=str(marked))
            if len(self._known_tools) == NUM_REMEMBERED:
                self._known_tools.clear()
            self._known_tools[text] = known
        return known

    def window(self, tools: Tools) -> Window | None:
        """Returns what of a conversation its end depends on; None: all of it."""
        template = self.template_kwargs.get("chat_template")
        if template is None and self.tokenizer.chat_template is None:
            return window_of(CHATML_TEMPLATE)
        return window_of(self.tokenizer.get_chat_template(template, tools=tools))

    def render_marked(self, messages: Messages, tools: Tools) -> str:
        """Renders marked messages, up to the next generation prompt."""
        return self._render_as_is(messages, tools, True)

    def render_ended(self, messages: Messages, tools: Tools) -> str:
        """Renders marked messages, the last of them an assistant's that nothing follows."""
        return self._render_as_is(messages, tools, False)

    # Methods of turns that a reader reads.

    def in_parts(self, text: str, tools: Tools) -> Message | None:
        """Returns a turn as a marked message in its parts; None: it is rendered as it stands."""
        message = None if self.reader is None else self.reader.as_message(text, tools)
        return None if message is None else self.marked([message])[0]

    def reads_alike(self, text: str, written: str) -> bool:
        """Checks whether what the template wrote for a turn says what was sampled."""
        assert self.reader is not None
        return self.reader.reads_alike(text, written.replace(MARK, ""))

    def says_alike(self, text: str, written: str) -> bool:
        """Does as `reads_alike`, with the end of the turn behind what was written."""
        ends = [written.find(stop) for stop in self.stop_texts if stop in written]
        end = min(ends, default=len(written))
        return self.reads_alike(text, self.through_read_end(written[:end], written[end:]))

    def through_read_end(self, written: str, closing: str) -> str:
        """Returns what was written for a turn, with the end that the reader reads, if it does."""
        assert self.reader is not None
        for stop in self.stop_texts & self.reader.read_markers:
            if closing.startswith(stop):
                return written + stop
        return written

    def split_turn(self, ended: str, going_on: str) -> tuple[str, str]:
        """Splits what the template writes behind a prompt: the turn, and its end and what follows.

        Args:
            ended: where nothing follows the turn.
            going_on: where something does.
        """
        end = 0
        while end < min(len(ended), len(going_on)) and ended[end] == going_on[end]:
            end += 1
        # Two markers may begin alike.
        for special in self.special_texts:
            begin = going_on.rfind(special[0], max(end - len(special), 0), end)
            if 0 <= begin < end < begin + len(special) and going_on.startswith(special, begin):
                end = begin
        turn = going_on[:end].rstrip()
        for stop in self.stop_texts:
            if turn.endswith(stop):
                end = len(turn) - len(stop)
        return going_on[:end], going_on[end:]

    def _render_as_is(self, messages: Messages, tools: Tools, add_generation_prompt: bool) -> str:
        variables = dict(self.template_kwargs)
        if tools is not None:
            variables["tools"] = list(tools)
        try:
            return render_chat(
                self.tokenizer, messages, add_generation_prompt=add_generation_prompt, **variables
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateRefusal(
                f"the chat template of {self.name!r} refuses a conversation of {roles}: {error}. "
                "Let the environment answer with messages that the template takes, or set another "
                "template"
            ) from error

    def _render_or_nothing(self, messages: Messages, add_generation_prompt: bool) -> str:
        """Renders a conversation; "" where the template refuses it."""
        try:
            return self._render_as_is(messages, None, add_generation_prompt)
        except ValueError:
            return ""

    def encode(self, text: str) -> list[int]:
        """Tokenises what was rendered; of short texts the ids are remembered, for they come again.

        The members of a group have one prompt, and environments repeat themselves.
        """
        if len(text) <= REMEMBERED_CHARS:
            return list(self._remembered_ids(text))
        return self._encode_anew(text)

    def _encode_anew(self, text: str) -> list[int]:
        # An environment may hand over halves of surrogate pairs, which no tokenizer takes.
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode("utf-8")
        return encode_rendered(self.tokenizer, text)

    def decode(self, token_ids: list[int]) -> str:
        """Returns the text of ids, special tokens included."""
        return self.tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    @cached_property
    def accepts_system(self) -> bool:
        """Checks whether the template renders a system message; logs it where it does not."""
        probe = [{"role": "system", "content": PLACEHOLDER}, _user("Hello")]
        accepted = PLACEHOLDER in self._render_or_nothing(probe, True)
        if not accepted:
            logger.warning(
                "the chat template of %r takes no system message; it goes into the first user "
                "message",
                self.name,
            )
        return accepted

    def closing(
        self, messages: Messages, new_messages: Messages, tools: Tools, **options: Any
    ) -> str | None:
        """Returns what the template renders behind an assistant's text.

        None where it leaves that text out.
        """
        placeholder = PLACEHOLDER
        all_texts = str([self.marked([*messages, *new_messages]), tools])
        while placeholder in all_texts:
            placeholder += "x"
        conversation = [*messages, _assistant(placeholder), *new_messages]
        pieces = self.rendered(conversation, tools, **options).split(placeholder)
        if len(pieces) != 2:
            return None
        return pieces[1]

    @cached_property
    def _silent_ids(self) -> frozenset[int]:
        """Holds the ids that no environment reads; see `text`."""
        named = self.tokenizer.special_tokens_map.values()
        named = [token for token in named if isinstance(token, str)]
        added = self.tokenizer.added_tokens_decoder.items()
        special = {token_id for token_id, token in added if token.special}
        # A template of one turn only still has text to read.
        turns = self._render_or_nothing(
            [_user("Hello"), _assistant("Hello"), _user("Hello")], False
        )
        written = special.intersection(self.encode(turns))
        silent = self.eos_token_ids.union(self.tokenizer.convert_tokens_to_ids(named), written)
        return silent.difference(self._read_ids)

    @cached_property
    def _read_ids(self) -> frozenset[int]:
        """Holds the ids of the special tokens that the reader reads."""
        if self.reader is None:
            return frozenset()
        vocabulary = self.tokenizer.get_vocab()
        return frozenset(
            vocabulary[text] for text in self.reader.read_markers if text in vocabulary
        )

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """Holds the texts that nothing but the template may make tokens of."""
        # Some models stop at an added token that is not declared special.
        added = self.tokenizer.added_tokens_decoder.items()
        stops = [token.content for token_id, token in added if token_id in self.eos_token_ids]
        return special_texts(self.tokenizer).union(stops)

    @cached_property
    def _silent_texts(self) -> frozenset[str]:
        """Holds the special texts that no environment reads, marked in the policy's own turns."""
        to_id = self.tokenizer.convert_tokens_to_ids
        return frozenset(text for text in self.special_texts if to_id(text) in self._silent_ids)


class Conversation:
    """Holds one conversation, and joins the turns that are sampled in it.

    Args:
        turns: of the policy's tokenizer and template.
        messages: the first ones.
    """

    def __init__(self, turns: TurnTokens, messages: Messages, tools: Tools = None) -> None:
        self._turns = turns
        known_tools = turns.marked_tools(tools)
        self._own_tools = tools
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

    def copy(self) -> Conversation:
        """Returns a conversation that stands where this one does, and grows apart from it."""
        other = copy.copy(self)
        other._messages = list(self._messages)
        return other

    @property
    def tools(self) -> Tools:
        """Returns the tools' schemas as they were given."""
        return self._own_tools

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
        in_parts = turns.in_parts(text, self._own_tools)
        if in_parts is not None:
            joined = self._join_in_parts(in_parts, text, sampled_ids, new_messages)
            if joined is not None:
                return joined
        answer, *reply = turns.marked([_assistant(text), *new_messages])
        self._avoid(str(reply))
        self._move_window()
        try:
            closing = self._closing_of_all(answer, reply)
        except TemplateRefusal:
            # Some templates refuse markers in a turn's text: it stays as ids, spelt for them.
            answer = turns.spelt(_assistant(text))
            closing = self._closing_of_all(answer, reply)
        self._messages += [answer, *reply]
        self._avoid(answer["content"])
        return self._joined(closing, sampled_ids)

    def _joined(self, closing: str | None, sampled_ids: Sequence[int]) -> Join:
        """Returns the join of what the template writes behind an answer; None: it rewrites all."""
        turns = self._turns
        if closing is not None:
            closing_ids = turns.encode(closing)
            if not turns.ends.ends_otherwise(closing_ids, sampled_ids):
                return Join(turns.ends.without_sampled(closing_ids, list(sampled_ids)))
        return Join([], rewritten=turns.encode(self._rendered))

    def _join_in_parts(
        self,
        answer: Message,
        text: str,
        sampled_ids: Sequence[int],
        new_messages: Messages,
    ) -> Join | None:
        """Joins a turn that the template takes in its parts: thinking, text and calls.

        None where it does not, or leaves out what was sampled or what answers it; then nothing is
        added. What was sampled stays where its rendering says the same in whatever spelling.
        """
        turns = self._turns
        self._show_all()
        before = self._rendered.rstrip()
        reply = turns.marked(new_messages)
        shown = [*self._shown, answer]
        try:
            ended = turns.render_ended(shown, self._tools)
            rendered = turns.render_marked([*shown, *reply], self._tools)
        except TemplateRefusal:
            return None
        closing = None
        if rendered.startswith(before):
            written, closing = turns.split_turn(ended[len(before) :], rendered[len(before) :])
            if not all(squashed(each["content"]) in squashed(closing) for each in reply):
                return None
            if not turns.reads_alike(text, turns.through_read_end(written, closing)):
                closing = None
        if closing is None and not (
            ended.startswith(before) and turns.says_alike(text, ended[len(before) :])
        ):
            # The template leaves out calls, or thinking: the turn's own text may say more.
            return None
        self._shown = [*shown, *reply]
        self._messages += [answer, *reply]
        self._rendered = rendered
        self._avoid(str([answer, *reply]))
        return self._joined(closing, sampled_ids)

    def _closing_of_all(self, answer: Message, reply: Sequence[Message]) -> str | None:
        """Does as `_closing`, of the window if that will do, else of all messages."""
        if self._leaves_out:
            closing = self._closing_of_window(answer, reply)
            if closing is not None:
                return closing
        self._show_all()
        return self._closing(answer, reply)

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
        shown = [*self._shown, answer, *reply]
        rendered = self._turns.render_marked(shown, self._tools)
        pieces = self._turns.render_marked(with_any_answer, self._tools).split(self._placeholder)
        self._shown = shown
        self._rendered = rendered
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


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _common_text(first: str, second: str) -> int:
    """Measures how far two texts agree, up to the end of a line or of a marker."""
    end = 0
    while end < min(len(first), len(second)) and first[end] == second[end]:
        end += 1
    return max(second.rfind(mark, 0, end) for mark in "\n>]") + 1
