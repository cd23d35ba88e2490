"""Finds the markers that a chat template writes around turns, declared special or not.

    <|im_start|>user↵ text <|im_end|>↵       <|im_start|>, <|im_end|>
    <｜User｜> text <｜Assistant｜>            both, which DeepSeek's tokenizer does not declare

Where such a marker is one token, a text that spells it would open or close a turn. Invariant: words
are no markers, though a vocabulary of whole words has `user` as one token; nor are the tags within
an assistant's turn, such as `<think>`, which system prompts may well spell.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Each stands for a message's text.
CONTENTS = ("firstofthetexts", "secondofthetexts", "thirdofthetexts")
# The roles of the conversations that are looked at; a template may refuse some.
CONVERSATIONS = (
    ("user", "assistant", "user"),
    ("system", "user"),
    ("user", "assistant", "tool"),
)
# An ordinary token of a vocabulary that is a marker looks like this: <…> or […] with a letter.
_BRACKETED = re.compile(r"<(?=[^<>]*[^\W\d_])[^\s<>]+>|\[(?=[^][]*[^\W\d_])[^\s\[\]]+\]")
_TAG = re.compile(r"([<\[])/?([^/<>\[\]]+)([>\]])")


@lru_cache(maxsize=16)
def turn_markers(tokenizer: "PreTrainedTokenizerBase", template: str, _size: int) -> frozenset[str]:
    """Returns the texts of the single tokens that the template itself writes around turns.

    Args:
        template: the chat template, in Jinja.
        _size: of the tokenizer's vocabulary, so that one that has grown is looked at again.
    """
    markers: set[str] = set()
    for roles, to_answer in product(CONVERSATIONS, (False, True)):
        for frame, opens_assistant in _frames(tokenizer, template, roles, to_answer):
            for marker in _single_tokens(tokenizer, frame):
                if not (opens_assistant and _is_tag(tokenizer, marker)):
                    markers.add(marker)
    return frozenset(markers)


def _frames(
    tokenizer: "PreTrainedTokenizerBase", template: str, roles: Sequence[str], to_answer: bool
) -> Iterator[tuple[str, bool]]:
    """Yields what the template writes before, between and behind texts.

    With each comes whether an assistant's text follows, which may begin with tags; behind the last
    text one does where the conversation is rendered `to_answer`.
    """
    messages: list[Mapping[str, Any]] = []
    for role, content in zip(roles, CONTENTS, strict=False):
        messages.append({"role": role, "content": content})
    try:
        rest = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=to_answer
        )
    # A template refuses roles in its own ways.
    except (TemplateError, TypeError, ValueError, LookupError):
        return
    for message in messages:
        frame, found, rest = rest.partition(message["content"])
        if not found:
            return
        yield frame, message["role"] == "assistant"
    yield rest, to_answer


def _single_tokens(tokenizer: "PreTrainedTokenizerBase", text: str) -> Iterator[str]:
    """Yields the tokens of a template's own text that are markers by their form."""
    added = tokenizer.added_tokens_decoder
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        if token_id in added:
            content = added[token_id].content
            is_marker = bool(content.strip()) and not content.strip().isalnum()
        else:
            content = tokenizer.convert_ids_to_tokens(token_id)
            is_marker = _BRACKETED.fullmatch(content) is not None
        # An unknown word's token is not what the text has.
        if is_marker and content in text:
            yield content


def _is_tag(tokenizer: "PreTrainedTokenizerBase", text: str) -> bool:
    """Checks whether a token is one of a pair, `<think>` and `</think>`, of the vocabulary."""
    tag = _TAG.fullmatch(text)
    if tag is None:
        return False
    left, name, right = tag.groups()
    vocabulary = tokenizer.get_vocab()
    return f"{left}{name}{right}" in vocabulary and f"{left}/{name}{right}" in vocabulary
