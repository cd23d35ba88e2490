"""Reads files of conversations, of prompts with answers, and of token ids, as rows to learn.

    {"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]}
    {"prompt": "2 + 3?", "answer": "5"}
    {"input_ids": [...], "loss_mask": [...], "tokenizer": "..."}

The last form is what features.records.select writes; its ids are taken as they are. Invariant:
whatever cannot be learnt is told with its file and row before anything is trained, but for what the
settings drop, which is counted.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data.chat_templates import Message
from data.prompt_files import read_rows
from data.prompt_messages import (
    lost_in_tokens,
    lost_piece,
    text_messages,
    with_parsed_arguments,
    without_added_nulls,
)
from data.turn_tokens import MARK, TemplateRefusal, Tools, TurnTokens
from data.watchdog import beat
from features.sft.settings import SFTSettings
from features.sft.turns import ASSISTANT, BadConversation, TrainedRow, rows_of_conversation, trimmed
from features.shared.tokenizers import tokenizer_fingerprint

logger = logging.getLogger(__name__)

IDS = "input_ids"
MASK = "loss_mask"
TOKENIZER = "tokenizer"
# So many faults are told.
MOST_NAMED = 5


class BadData(ValueError):
    """Reports what is wrong with the data, in a sentence a row."""


@dataclass(frozen=True)
class RowReader:
    """Reads rows of files.

    Attributes:
        settings: of what is learnt, and how columns are called.
        tokens: of the policy's tokenizer and template, as its rollouts have them.
        max_length: tokens that a row may have.
        vocabulary: ids from 0 on that the model knows.
        never_sampled: ids that the policy never samples, so that nothing learns them.
    """

    settings: SFTSettings
    tokens: TurnTokens
    max_length: int
    vocabulary: int
    never_sampled: frozenset[int] = frozenset()

    def read(self, files: Sequence[str], key: str = "sft.files") -> list[TrainedRow]:
        """Reads all rows of all files, in order.

        Raises:
            BadData: some cannot be learnt, or there is nothing to learn.
        """
        rows: list[TrainedRow] = []
        # Where a sentence holds, by the sentence.
        faults: dict[str, list[str]] = {}
        silent = 0
        long = 0
        empty = 0
        for file in files:
            for number, source in enumerate(read_rows(file)):
                beat("a conversation read")
                where = f"{file} row {number}"
                try:
                    made = self.rows_of(source)
                    fitting = self._fitting(made)
                except (BadConversation, TemplateRefusal, ValueError) as error:
                    faults.setdefault(str(error), []).append(where)
                    continue
                silent += not made
                empty += any(map(self._learns_ends_alone, fitting))
                long += len(made) - len(fitting)
                rows += fitting
        named = f"{key}=[{', '.join(files)}]"
        if faults:
            raise BadData(_told(faults, named))
        if not rows:
            raise BadData(
                f"{named} has no token to learn: {silent} rows have none in messages of "
                f"{', '.join(self.settings.trained_roles)} (sft.trained_roles, or a message's "
                f"`train`), and {long} are longer than {self.max_length} tokens"
            )
        if silent:
            logger.warning("%s: %d rows have nothing to learn, and are left out", named, silent)
        if long:
            logger.warning(
                "%s: %d rows have more than %d tokens, and are left out (sft.too_long=drop)",
                named,
                long,
                self.max_length,
            )
        if empty:
            logger.warning(
                "%s: in %d rows an answer is empty, so that its end alone is learnt", named, empty
            )
        return rows

    def rows_of(self, source: Mapping[str, Any]) -> list[TrainedRow]:
        """Returns the rows of a line: one, or several where a conversation's history is rewritten.

        Raises:
            BadConversation, TemplateRefusal, ValueError: it gives none.
        """
        if source.get(IDS) is not None:
            return self._given(source)
        messages = self.messages_of(source)
        tools = self._tools_of(source)
        messages = self._as_the_template_takes(messages, tools)
        learnt = [each for each in messages if each["role"] in self.settings.trained_roles]
        lost = lost_in_tokens(self.tokens.tokenizer, learnt)
        if lost:
            raise BadConversation(
                f"says {', '.join(lost[:5])}, for which the tokenizer of {self.tokens.name!r} has "
                "no tokens: take the row out, or use a tokenizer that encodes bytes"
            )
        rows = rows_of_conversation(self.tokens, messages, tools, self.settings.trained_roles)
        for row in rows:
            self._require_sampled(row)
        return rows

    def _as_the_template_takes(self, messages: list[Message], tools: Tools) -> list[Message]:
        """Returns messages with calls' arguments as the template writes them: text or mappings.

        Raises:
            BadConversation: it leaves out what was said to the policy.
        """
        if not messages:
            raise BadConversation("has a conversation without a message")
        lost = None
        for form in (messages, [with_parsed_arguments(message) for message in messages]):
            # An assistant's text may be left out of a history; its own turn is looked at later.
            told = [
                {**message, "content": ""} if message["role"] == ASSISTANT else message
                for message in form
            ]
            rendered = self.tokens.rendered(form, tools, add_generation_prompt=False)
            lost = lost_piece(told, rendered.replace(MARK, ""))
            if lost is None:
                return form
        assert lost is not None
        raise BadConversation(
            f"says {lost.text!r:.60} in {lost.owner}, which the chat template of "
            f"{self.tokens.name!r} leaves out, or changes: write it in the roles and the form that "
            "the template knows, or set another template"
        )

    def messages_of(self, source: Mapping[str, Any]) -> list[Message]:
        """Returns a line's conversation; a prompt with its answer is one."""
        settings = self.settings
        conversation = source.get(settings.messages_key)
        if conversation is not None:
            return _messages(conversation)
        prompt = source.get(settings.prompt_key)
        answer = source.get(settings.answer_key)
        if prompt is None or answer is None:
            columns = ", ".join(source) or "none"
            raise BadConversation(
                f"has neither {settings.messages_key}, nor {settings.prompt_key} and "
                f"{settings.answer_key}, nor {IDS} and {MASK} (it has {columns}): name its columns "
                "by sft.messages_key, sft.prompt_key and sft.answer_key"
            )
        if not isinstance(answer, str):
            raise BadConversation(
                f"has the {settings.answer_key} {answer!r:.60}; an answer is a text"
            )
        asked = text_messages(prompt) if isinstance(prompt, str) else _messages(prompt)
        return [*asked, *text_messages([{"role": ASSISTANT, "content": answer}])]

    def _tools_of(self, source: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        tools = source.get(self.settings.tools_key)
        if isinstance(tools, str) and tools.strip():
            tools = read_json(tools, self.settings.tools_key)
        if not tools:
            return None
        plain = without_added_nulls(tools)
        if not isinstance(plain, list) or not all(isinstance(tool, Mapping) for tool in plain):
            raise BadConversation(
                f"has the {self.settings.tools_key} {tools!r:.60}; tools are a list of schemas, "
                "or its JSON text"
            )
        return plain

    def _given(self, source: Mapping[str, Any]) -> list[TrainedRow]:
        """Returns a row of token ids as it stands, once it is known to be of this tokenizer."""
        ids = _whole_numbers(source[IDS], IDS)
        mask = _whole_numbers(source.get(MASK), MASK)
        if len(ids) != len(mask) or not set(mask) <= {0, 1}:
            raise BadConversation(
                f"has {len(ids)} {IDS} and {len(mask)} {MASK}: both have an entry for each token, "
                f"and those of {MASK} are 0 or 1"
            )
        own = tokenizer_fingerprint(self.tokens.tokenizer)
        written = source.get(TOKENIZER)
        outside = [token for token in ids if not 0 <= token < self.vocabulary]
        if (written is not None and written != own) or outside:
            told = f"the id {outside[0]}, which" if outside else f"ids of the tokenizer {written},"
            other = " the model does not know" if outside else f" and the model's is {own}"
            raise BadConversation(
                f"has {told}{other}: ids are read by the tokenizer that wrote them alone. Select "
                "from runs of this model, or give the conversations as messages"
            )
        row = TrainedRow(ids, mask)
        if not any(mask):
            return []
        if mask[0]:
            raise BadConversation("learns its first token, before which nothing stands")
        self._require_sampled(row)
        return [trimmed(row)]

    def _require_sampled(self, row: TrainedRow) -> None:
        never = sorted(self.never_sampled.intersection(_learnt(row)))
        if never:
            raise BadConversation(
                f"learns the id {never[0]}, which the policy never samples "
                "(actor_rollout_ref.rollout.banned_token_ids, or a placeholder of pictures)"
            )

    def _learns_ends_alone(self, row: TrainedRow) -> bool:
        """Checks whether a row learns nothing but the end of a turn."""
        return set(_learnt(row)) <= set(self.tokens.eos_token_ids)

    def _fitting(self, rows: list[TrainedRow]) -> list[TrainedRow]:
        """Returns the rows that are not too long, cut or left out as the settings say.

        Raises:
            BadConversation: one is too long, and that is an error.
        """
        fitting = []
        for row in rows:
            if len(row.ids) <= self.max_length:
                fitting.append(row)
                continue
            if self.settings.too_long == "error":
                raise BadConversation(
                    f"has a row of {len(row.ids)} tokens, more than {self.max_length} "
                    "(sft.max_length, by default data.max_prompt_length + "
                    "data.max_response_length): raise it, or set sft.too_long to drop or cut"
                )
            cut = TrainedRow(row.ids[: self.max_length], row.mask[: self.max_length])
            if self.settings.too_long == "cut" and any(cut.mask):
                fitting.append(trimmed(cut))
        return fitting


def _learnt(row: TrainedRow) -> list[int]:
    """Returns the ids of a row that are learnt."""
    return [token for token, is_on in zip(row.ids, row.mask, strict=True) if is_on]


def _messages(value: Any) -> list[Message]:
    """Returns a conversation's messages of text, without Arrow's nulls; JSON text is read.

    Raises:
        BadConversation, ValueError: it is no list of messages.
    """
    if isinstance(value, str):
        value = read_json(value, "conversation")
    plain = without_added_nulls(value)
    if not isinstance(plain, list) or not all(isinstance(message, Mapping) for message in plain):
        raise BadConversation(
            f"has the conversation {value!r:.60}; a conversation is a list of messages, each "
            "with role and content"
        )
    return [_with_read_calls(message) for message in text_messages(plain)]


def _with_read_calls(message: Message) -> Message:
    """Returns a message whose calls are objects, where they were JSON text.

    Raises:
        BadConversation: a call is none.
    """
    calls = message.get("tool_calls")
    if isinstance(calls, str):
        calls = read_json(calls, "tool_calls") if calls.strip() else None
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    if not isinstance(calls, list):
        calls = [calls]
    read = [read_json(call, "call") if isinstance(call, str) else call for call in calls]
    for call in read:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadConversation(
                f"has the call {call!r:.60}; a call is {{'function': {{'name': …, "
                "'arguments': {…}}}, or its JSON text"
            )
    return {**message, "tool_calls": read}


def read_json(text: str, what: str) -> Any:
    """Reads JSON text of a row.

    Raises:
        BadConversation: it is none.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadConversation(
            f"has the {what} {text!r:.60}, a text that is no JSON ({error}); write it as JSON, or "
            "as the list that it is"
        ) from error


def _whole_numbers(values: Any, name: str) -> list[int]:
    """Returns a column's entries as whole numbers; none where the column is not there.

    Raises:
        BadConversation: it is no list of such.
    """
    if values is None:
        return []
    wrong = values
    if isinstance(values, list):
        bad = [entry for entry in values if not isinstance(entry, int | float) or entry % 1]
        if not bad:
            return [int(entry) for entry in values]
        wrong = bad[0]
    raise BadConversation(
        f"has {wrong!r:.60} in {name}; it is a list of whole numbers, one a token"
    )


def _told(faults: Mapping[str, Sequence[str]], named: str) -> str:
    """Puts the first faults into one sentence, each with the row that has it first."""
    shown = []
    for fault, places in list(faults.items())[:MOST_NAMED]:
        more = f"; so have {len(places) - 1} more rows" if len(places) > 1 else ""
        shown.append(f"{places[0]} {fault}{more}")
    rows = sum(map(len, list(faults.values())[MOST_NAMED:]))
    others = f"; {rows} more rows have other faults" if rows else ""
    return f"{named} cannot be learnt: {'; '.join(shown)}{others}"


def fingerprint(rows: Sequence[TrainedRow]) -> str:
    """Returns a short text that is equal for equal rows in one order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row).encode())
    return digest.hexdigest()[:16]
