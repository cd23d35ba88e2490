"""Brings a row's prompt into messages of text, and sees that all of it reaches the prompt.

    parts of text  ->  one string        null that Arrow adds  ->  no key     pictures  ->  refused
    rendered text, tokens  ->  every message's text is found there again, or the row is refused

Invariant: no text of a row is lost without a word. A template may leave out the thinking of earlier
turns by its design; a warning says so once.
"""

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import TemplateError

from data.chat_templates import (
    MARK,
    Message,
    Messages,
    Prompt,
    Tokenizer,
    as_messages,
    encode_rendered,
    mark_specials,
    render_chat,
    special_texts,
)
from data.warn_once import warn_once

TEXT_PARTS = ("text", "input_text", "output_text", None)
# Roles that templates may write otherwise, such as `model` for the assistant.
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
# Where conversations keep what a model thought before it answered.
THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
THINKING_END = "</think>"
# Columns that hold what is no text.
MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
# Characters of a text that an error shows.
MOST_SHOWN = 60


class SaidText(NamedTuple):
    """Holds a text that a prompt must have.

    Attributes:
        text: as it stands in the row.
        owner: names the message.
        may_be_quoted: it may be written as JSON writes it: quotes and line breaks with a backslash.
    """

    text: str
    owner: str
    may_be_quoted: bool = True


# --- From a row to messages ---


def text_messages(prompt: Prompt) -> list[Message]:
    """Makes messages whose contents are strings; keys that are None are left out.

    Raises:
        ValueError: a message has what is no text, or text that is none in UTF-8; the sentence
            continues "row N".
    """
    if isinstance(prompt, str):
        prompt = as_messages(prompt)
    messages: list[Message] = []
    for number, message in enumerate(prompt):
        entries = {key: value for key, value in message.items() if value is not None}
        role = entries.get("role")
        if role is None:
            raise ValueError(
                f"has in message {number} no role: it has the keys {', '.join(map(str, entries))}; "
                "a message is {'role': 'user', 'content': 'a text'}"
            )
        if not isinstance(role, str):
            raise ValueError(f"has in message {number} the role {role!r:.80}; a role is a text")
        owner = f"its {role} message {number}"
        entries["content"] = _content_text(entries.get("content", ""), owner)
        _require_utf8(entries, owner)
        messages.append(entries)
    return messages


def _content_text(content: Any, owner: str) -> str:
    """Returns a content as one string: its own, or its parts' texts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ValueError(
            f"has in {owner} the content {content!r:.80}; a content is a text, or a list of parts "
            "{'type': 'text', 'text': …}"
        )
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise ValueError(
                f"has in {owner} a part of type {kind!r}: {part!r:.80}; rows here are text. Take "
                "the part out, write it as text, or read it in a dataset of your own "
                "(data.custom_cls)"
            )
        others = [key for key in part if key not in ("type", "text") and part[key] is not None]
        media = [key for key in others if any(key.startswith(name) for name in MEDIA_COLUMNS)]
        if media:
            raise ValueError(f"has in {owner} a part with {media[0]!r} beside its text")
        texts.append(text)
    return "".join(texts)


def _require_utf8(value: Any, owner: str) -> None:
    """Raises ValueError where a text in a value cannot be written in UTF-8, or spells MARK."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            _require_utf8(key, owner)
            _require_utf8(entry, owner)
    elif isinstance(value, list | tuple):
        for entry in value:
            _require_utf8(entry, owner)
    elif isinstance(value, str) and not value.isascii():
        wrong = [character for character in value if _is_no_character(character)]
        if wrong:
            raise ValueError(
                f"has in {owner} {wrong[0]!a}, which is no character that a tokenizer takes; "
                "write the text anew, from its source"
            )


def _is_no_character(character: str) -> bool:
    """Checks for half of a surrogate pair, and for the noncharacter that marks texts here."""
    return "\ud800" <= character <= "\udfff" or character == MARK


def without_added_nulls(prompt: Any) -> Any:
    """Drops the keys in messages that Arrow has added because other rows have them, as None.

    A table's column has all rows' keys in every row: beside a call with {"query": "x"} stands
    "a": None, where another row's call has an a. What was written as null is dropped, too: a table
    does not tell them apart. Arguments in the form of a map, a list of pairs, become a mapping.
    """
    if isinstance(prompt, Mapping):
        kept = {}
        for key, value in prompt.items():
            if value is not None:
                kept[key] = without_added_nulls(value)
        return kept
    if isinstance(prompt, list):
        if prompt and all(isinstance(entry, tuple) and len(entry) == 2 for entry in prompt):
            return without_added_nulls(dict(prompt))
        return [without_added_nulls(entry) for entry in prompt]
    return prompt


def media_column(row: Mapping[str, Any]) -> str | None:
    """Names the row's column with pictures, films or sounds; None where it has none."""
    for column in MEDIA_COLUMNS:
        value = row.get(column)
        if value is not None and (not hasattr(value, "__len__") or len(value) > 0):
            return column
    return None


# --- From messages to tokens ---


def encode_prompt(
    tokenizer: Tokenizer, messages: Messages, where: str, **template_kwargs: Any
) -> list[int]:
    """Tokenises messages for the policy to answer, as `encode_chat` does.

    Arguments of a call that are JSON text are given to the template as the mapping that they are,
    where it does not write the text itself.

    Raises:
        ValueError: a text of the messages is not in the prompt, or not in its tokens; `where` names
            the row.
    """
    specials = special_texts(tokenizer)
    rendered = _render(tokenizer, mark_specials(messages, specials), where, template_kwargs)
    lost = lost_piece(messages, rendered.replace(MARK, ""))
    if lost is not None:
        parsed = [with_parsed_arguments(message) for message in messages]
        if parsed != list(messages):
            rendered = _render(tokenizer, mark_specials(parsed, specials), where, template_kwargs)
            lost = lost_piece(parsed, rendered.replace(MARK, ""))
    if lost is not None:
        raise ValueError(
            f"{where}: the chat template of {tokenizer.name_or_path!r} leaves out, or changes, the "
            f"text {_short(lost.text)} of {lost.owner}; mend the template, or write the prompt in "
            "the roles and the form that it knows"
        )
    _warn_of_lost_thinking(tokenizer, messages, rendered)
    token_ids = encode_rendered(tokenizer, rendered)
    _require_encoded(tokenizer, messages, token_ids, where)
    return token_ids


def _render(
    tokenizer: Tokenizer, messages: Messages, where: str, variables: Mapping[str, Any]
) -> str:
    """Renders messages; ValueError where the template fails on them."""
    try:
        return render_chat(tokenizer, messages, **variables)
    # Templates are programs: what they trip over may be any of these.
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise ValueError(
            f"{where}: the chat template of {tokenizer.name_or_path!r} fails on messages of "
            f"{roles}: {error}; mend the template or the prompts"
        ) from error


def lost_piece(messages: Messages, rendered: str) -> SaidText | None:
    """Returns the first text of the messages that is not in what was rendered; None: all are.

    White space does not count, and every text needs a place of its own.
    """
    rest = _compact(rendered)
    pieces: list[SaidText] = []
    for number, message in enumerate(messages):
        pieces += _pieces(message, f"its {message['role']} message {number}")
    # The long ones first: a short text may stand in a long one.
    for piece in sorted(pieces, key=lambda piece: -len(piece.text)):
        for form in _forms(piece):
            place = rest.find(form)
            if place >= 0:
                rest = f"{rest[:place]}\0{rest[place + len(form) :]}"
                break
        else:
            return piece
    return None


def _pieces(message: Message, owner: str) -> Iterator[SaidText]:
    """Lists the texts that a message says."""
    content = str(message.get("content") or "")
    if message["role"] == "assistant":
        # Templates take the thinking off turns that were answered.
        content = content.rpartition(THINKING_END)[2]
    if content.strip():
        yield SaidText(content, owner)
    if message["role"] not in KNOWN_ROLES:
        yield SaidText(str(message["role"]), f"the role of {owner}")
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        yield SaidText(str(function.get("name")), f"a call of {owner}")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            yield SaidText(arguments, f"a call's arguments of {owner}", may_be_quoted=False)
        else:
            yield from _leaves(arguments, f"a call's arguments of {owner}")


def _leaves(value: Any, owner: str) -> Iterator[SaidText]:
    """Lists the keys, texts and numbers of a value."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield SaidText(str(key), owner)
            yield from _leaves(entry, owner)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _leaves(entry, owner)
    elif isinstance(value, str) and value.strip():
        yield SaidText(value, owner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield SaidText(json.dumps(value), owner)


def _forms(piece: SaidText) -> list[str]:
    """Lists how a text may be written, without white space."""
    texts = [piece.text]
    if piece.may_be_quoted:
        texts += [json.dumps(piece.text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True)]
    return [_compact(text) for text in texts]


def _compact(text: str) -> str:
    """Drops white space, and the backslash forms that JSON gives it."""
    return "".join(text.replace("\\n", "").replace("\\t", "").replace("\\r", "").split())


def with_parsed_arguments(message: Message) -> Message:
    """Returns a message whose calls' arguments are mappings, where they are JSON text of one."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function", call))
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments)
            except ValueError:
                parsed = None
            if isinstance(parsed, Mapping):
                function["arguments"] = parsed
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _warn_of_lost_thinking(tokenizer: Tokenizer, messages: Messages, rendered: str) -> None:
    """Says once that a template leaves out what earlier turns thought."""
    compact = None
    for message in messages:
        thoughts = [str(message[key]) for key in THINKING_KEYS if message.get(key)]
        before, end, _ = str(message.get("content") or "").rpartition(THINKING_END)
        if end and message["role"] == "assistant":
            thoughts.append(before)
        if thoughts and compact is None:
            compact = _compact(rendered.replace(MARK, ""))
        for thought in thoughts:
            if compact is not None and _compact(thought) not in compact:
                warn_once(
                    "data.prompt_messages",
                    f"the chat template of {tokenizer.name_or_path!r} leaves out what rows say "
                    "that the assistant thought in earlier turns",
                )
                return


def _require_encoded(
    tokenizer: Tokenizer, messages: Messages, token_ids: Sequence[int], where: str
) -> None:
    """Raises ValueError where the tokenizer has no tokens for what the messages say."""
    lost = lost_in_tokens(tokenizer, messages, token_ids)
    if lost:
        raise ValueError(
            f"{where}: the tokenizer {tokenizer.name_or_path!r} has no tokens for "
            f"{', '.join(lost[:5])} of the prompt, which would be lost; take the row out, or "
            "use a tokenizer that encodes bytes"
        )


def lost_in_tokens(
    tokenizer: Tokenizer, messages: Messages, token_ids: Sequence[int] | None = None
) -> list[str]:
    """Lists what the messages say and the tokenizer has no tokens for.

    Args:
        token_ids: of the messages; None: they are encoded where that is to be known.
    """
    texts = [str(message.get("content") or "") for message in messages]
    said = "".join(texts)
    size = len(tokenizer)
    unproven = [
        character
        for character in sorted(set(said))
        if not character.isspace() and not _encodes_alone(tokenizer, size, character)
    ]
    if not unproven:
        return []
    if token_ids is None:
        token_ids = tokenizer.encode("\n".join(texts), add_special_tokens=False)
    found = set(_folded(tokenizer.decode(token_ids)))
    lost = [character for character in unproven if not found.issuperset(_folded(character))]
    unknown = tokenizer.unk_token_id
    if not lost and unknown is not None and unknown in token_ids:
        for text in texts:
            is_spelled = str(tokenizer.unk_token) in text
            if not is_spelled and unknown in tokenizer.encode(text, add_special_tokens=False):
                lost.append(_short(text))
    return lost


@lru_cache(maxsize=100_000)
def _encodes_alone(tokenizer: Tokenizer, _size: int, character: str) -> bool:
    """Checks whether a character comes back from its tokens; `_size` tells a grown tokenizer."""
    token_ids = tokenizer.encode(character, add_special_tokens=False)
    return set(_folded(tokenizer.decode(token_ids))).issuperset(_folded(character))


def _folded(text: str) -> str:
    """Returns a text as tokenizers may normalise it: small letters without accents."""
    letters = unicodedata.normalize("NFKD", text).casefold()
    return "".join(letter for letter in letters if not unicodedata.combining(letter))


def _short(text: str) -> str:
    return repr(text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…")
