"""Makes of a conversation the rows that a rollout of it would be: the same tokens, the same mask.

    messages     system user | assistant | user | assistant
    row          prompt      | turn 0    | join | turn 1
    mask         0           | 1         | 0    | 1

The turns' tokens are what the chat template writes for them, up to the token that stops sampling;
what stands between comes from the join by which rollouts go on (data/turn_tokens.py). Where the
template rewrites what came before, a rollout begins a new row, and so does this. Invariant: a
policy that writes these turns in an environment that answers so gives these rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from data.chat_templates import MARK, Message, Messages
from data.turn_ends import common_length
from data.turn_tokens import Tools, TurnTokens, squashed

ASSISTANT = "assistant"
# Keys by which a message says whether it is learnt; the second one is that of other trainers.
TRAIN_KEYS = ("train", "weight")


class TrainedRow(NamedTuple):
    """Holds a row of tokens and which of them are learnt, 1 or 0; both of one length."""

    ids: list[int]
    mask: list[int]


class BadConversation(ValueError):
    """Reports why a conversation gives no rows; its text continues "FILE row N "."""


def rows_of_conversation(
    tokens: TurnTokens,
    messages: Messages,
    tools: Tools = None,
    trained_roles: Collection[str] = (ASSISTANT,),
) -> list[TrainedRow]:
    """Returns the rows of a conversation, each up to its last learnt token; without one, none.

    Args:
        messages: with a `content`, assistants' with `tool_calls`; those whose `train` is true or
            false are learnt, or not, whatever their role.
        trained_roles: whose messages are learnt otherwise.

    Raises:
        BadConversation: the template leaves out what is to be learnt, or cannot tell where it
            stands.
        TemplateRefusal: the template does not take the conversation.
    """
    learnt = [is_learnt(message, trained_roles) for message in messages]
    plain = [_without_train_keys(message) for message in messages]
    places = [place for place, message in enumerate(plain) if message["role"] == ASSISTANT]
    if not places:
        raise BadConversation("has no message of the role assistant: a policy writes nothing in it")
    if places[0] == 0:
        raise BadConversation("begins with an assistant's message: a policy is asked before")
    writer = _RowWriter(tokens, plain, tools, learnt)
    writer.begin(places[0])
    for place, end in zip(places, [*places[1:], len(plain)], strict=True):
        writer.add_turn(place)
        if end < len(plain) or any(learnt[place + 1 :]):
            writer.add_reply(place + 1, end)
    return [trimmed(row) for row in writer.rows if any(row.mask)]


def is_learnt(message: Message, trained_roles: Collection[str]) -> bool:
    """Returns whether a message is learnt: as it says itself, else by its role."""
    for key in TRAIN_KEYS:
        own = message.get(key)
        if own is None:
            continue
        if own not in (0, 1):
            raise BadConversation(
                f"has a message with {key}={own!r}; allowed: true and false, or 1 and 0"
            )
        return bool(own)
    return message["role"] in trained_roles


def _without_train_keys(message: Message) -> Message:
    return {key: value for key, value in message.items() if key not in TRAIN_KEYS}


def trimmed(row: TrainedRow) -> TrainedRow:
    """Returns a row without what stands behind its last learnt token: nothing is learnt by it."""
    end = len(row.mask) - row.mask[::-1].index(1)
    return TrainedRow(row.ids[:end], row.mask[:end])


class _RowWriter:
    """Writes the rows of a conversation, turn by turn.

    Args:
        learnt: of each message, whether its tokens are.
    """

    def __init__(
        self, tokens: TurnTokens, messages: Messages, tools: Tools, learnt: Sequence[bool]
    ) -> None:
        self.tokens = tokens
        self.messages = messages
        self.tools = tools
        self.learnt = learnt
        self.rows: list[TrainedRow] = []
        self._turn: list[int] = []

    def begin(self, end: int) -> None:
        """Begins the first row with the messages up to this place."""
        self.conversation = self.tokens.conversation(self.messages[:end], self.tools)
        self._begin_row(self.conversation.prompt(), 0, end)

    def _begin_row(self, prompt: list[int], first: int, end: int) -> None:
        """Begins a row with a prompt; of its messages those of the places given are learnt."""
        mask = [0] * len(prompt)
        if any(self.learnt[first:end]):
            text = self.tokens.rendered(self.messages[:end], self.tools)
            self._mark(mask, prompt, text, first, end)
        self.rows.append(TrainedRow(prompt, mask))

    def add_turn(self, place: int) -> None:
        """Adds an assistant's message as the policy would have sampled it."""
        before, answer = self.messages[:place], self.messages[place]
        reply = self.messages[place + 1 : place + 2]
        self._turn = turn_ids(self.tokens, before, answer, reply, self.tools)
        row = self.rows[-1]
        row.ids.extend(self._turn)
        row.mask.extend([int(self.learnt[place])] * len(self._turn))

    def add_reply(self, begin: int, end: int) -> None:
        """Adds what answers the last turn, the messages of these places, up to the next prompt."""
        reply = self.messages[begin:end]
        join = self.conversation.join(self._turn, reply)
        if join.rewritten is not None:
            # What was learnt of the earlier messages stands in the rows before.
            self._begin_row(join.rewritten, begin, end)
            return
        mask = [0] * len(join.token_ids)
        if any(self.learnt[begin:end]):
            before = self.messages[: begin - 1]
            text = self.tokens.closing(before, reply, self.tools) or ""
            self._mark(mask, join.token_ids, text, begin, end)
        row = self.rows[-1]
        row.ids.extend(join.token_ids)
        row.mask.extend(mask)

    def _mark(self, mask: list[int], ids: list[int], text: str, begin: int, end: int) -> None:
        """Sets the mask to 1 on the tokens of learnt messages.

        Args:
            mask, ids: of what was rendered last.
            text: which ends as that was rendered.
            begin, end: places of the messages.
        """
        whole = self.tokens.encode(text)
        if whole[len(whole) - len(ids) :] != ids:
            raise BadConversation(f"{self._cannot_mark(begin, end)}: it writes them another way")
        start = 0
        for place in range(begin, end):
            content = self.tokens.marked([self.messages[place]])[0]["content"]
            found = text.find(content, start) if content else start
            if self.learnt[place]:
                if found < 0 or not content:
                    raise BadConversation(
                        f"{self._cannot_mark(place, place + 1)}: its text stands nowhere as it is"
                    )
                first = common_length(whole, self.tokens.encode(text[:found]))
                rest = self.tokens.encode(text[found + len(content) :])
                last = len(whole) - common_length(whole[::-1], rest[::-1])
                shift = len(whole) - len(ids)
                for number in range(max(first - shift, 0), last - shift):
                    mask[number] = 1
            if found >= 0:
                start = found + len(content)

    def _cannot_mark(self, begin: int, end: int) -> str:
        roles = ", ".join(self.messages[place]["role"] for place in range(begin, end))
        return (
            f"cannot be learnt: the chat template of {self.tokens.name!r} cannot mark where the "
            f"messages of {roles} stand; take these roles out of sft.trained_roles"
        )


def turn_ids(
    tokens: TurnTokens, before: Messages, answer: Message, reply: Messages, tools: Tools = None
) -> list[int]:
    """Returns the ids by which the policy would have sampled an assistant's message, its end too.

    Args:
        before, reply: the messages before it, and those that answer it, if any.

    Raises:
        BadConversation: the template leaves out its text, or its calls.
    """
    prompt = tokens.rendered(before, tools)
    ended = tokens.rendered([*before, answer], tools, add_generation_prompt=False)
    content = tokens.marked([answer])[0].get("content") or ""
    written = None
    for begin in (prompt, prompt.rstrip()):
        if ended.startswith(begin):
            written = ended[len(begin) :]
            break
    if written is None or squashed(content) not in squashed(written):
        written = _as_it_stands(tokens, content, prompt, answer)
    _require_calls(tokens, answer, written)
    ends = [written.find(stop) + len(stop) for stop in tokens.stop_texts if stop in written]
    if ends:
        return tokens.encode(written[: min(ends)])
    return [*tokens.encode(written.rstrip()), _end_id(tokens, before, reply, tools)]


def _end_id(tokens: TurnTokens, before: Messages, reply: Messages, tools: Tools) -> int:
    """Returns the id that ends a turn whose end the template does not write.

    In some templates that is the marker of the reply's role.
    """
    closing = tokens.encode(tokens.closing(before, reply, tools) or "") if reply else []
    if closing and closing[0] in tokens.eos_token_ids:
        return closing[0]
    through_stop = tokens.ends.through_stop(tokens.ends.end_ids)
    own = tokens.tokenizer.eos_token_id
    return through_stop[-1] if through_stop else min(tokens.eos_token_ids) if own is None else own


def _as_it_stands(tokens: TurnTokens, content: str, prompt: str, answer: Message) -> str:
    """Returns a turn's own text, where the template leaves out a part of it, such as thinking.

    What the prompt has of it already, such as `<think>`, is not written again.
    """
    if answer.get("tool_calls"):
        raise BadConversation(
            f"has an assistant's message with text and calls of which the chat template of "
            f"{tokens.name!r} leaves out the text: write the calls into the text as the model "
            "writes them"
        )
    text = content
    for length in range(min(len(text), len(prompt)), 0, -1):
        if prompt.endswith(text[:length]):
            return text[length:]
    return text


def _require_calls(tokens: TurnTokens, answer: Message, written: str) -> None:
    """Requires that the template wrote the calls of a message."""
    for call in answer.get("tool_calls") or ():
        name = str(call.get("function", call).get("name", ""))
        if name not in written.replace(MARK, ""):
            raise BadConversation(
                f"has a call of {name!r} that the chat template of {tokens.name!r} leaves out: "
                "take a template that writes tool_calls, or write the call into the text"
            )
