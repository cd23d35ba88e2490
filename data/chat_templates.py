"""Renders conversations by a chat template and tokenises them, safe from what texts spell.

Only the template opens and closes turns: a special token, or another marker of turns
(data/turn_markers.py), that an environment, a tool or the policy spells in its text is encoded as
the ordinary text that it is, and ends no turn (`mark_specials`).
Special tokens come from the template alone: a begin-of-sequence token is never doubled
(`add_special_tokens=False`).
"""

import copy
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from jinja2 import TemplateError, TemplateSyntaxError
from tokenizers import Regex, pre_tokenizers

from data.turn_markers import turn_markers
from data.warn_once import warn_once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

Message = Mapping[str, Any]
Messages = Sequence[Message]
# Chat messages, or one user message.
Prompt = str | Messages
Tokenizer: TypeAlias = "PreTrainedTokenizerBase"
Processor: TypeAlias = "ProcessorMixin | None"

# Breaks a special token's text in messages, `<` MARK `|im_end|>`; a noncharacter of Unicode, which
# texts do not have.
MARK = "\ufdd0"
CHATML_TEMPLATE = Path(__file__).with_name("chatml.jinja").read_text(encoding="utf-8")


def as_messages(prompt: Prompt) -> list[Message]:
    """Makes one user message of a plain string; a list of messages stays as it is."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return list(prompt)


def render_chat(tokenizer: Tokenizer, prompt: Prompt, **template_kwargs: Any) -> str:
    """Renders a conversation by the tokenizer's chat template, or as ChatML where it has none.

    Args:
        prompt: chat messages (`role`, `content`), or one user message as a string.
        template_kwargs: variables of the template, such as `tools` or `enable_thinking`; unless
            `add_generation_prompt=False` is among them, the text ends with what starts the
            assistant's turn.
    """
    if tokenizer.chat_template is None and "chat_template" not in template_kwargs:
        name = tokenizer.name_or_path
        warn_once(
            "data.turn_tokens",
            f"tokenizer {name!r} has no chat template; prompts are rendered as ChatML",
        )
        template_kwargs["chat_template"] = CHATML_TEMPLATE
    variables = {"add_generation_prompt": True, **template_kwargs}
    return tokenizer.apply_chat_template(as_messages(prompt), tokenize=False, **variables)


def require_template(tokenizer: Tokenizer, template_kwargs: Mapping[str, Any]) -> None:
    """Requires a chat template that Jinja can read; what it refuses is told when it does.

    Raises:
        ValueError: it has a syntax error; names where it stands.
    """
    try:
        render_chat(tokenizer, "Hello", **template_kwargs)
    except TemplateSyntaxError as error:
        place = "its chat_template.jinja, or chat_template in its tokenizer_config.json"
        if "chat_template" in template_kwargs:
            place = "data.apply_chat_template_kwargs.chat_template"
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} has a syntax error in line "
            f"{error.lineno}: {error.message}; mend {place}"
        ) from error
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
        return


def encode_chat(tokenizer: Tokenizer, prompt: Prompt, **template_kwargs: Any) -> list[int]:
    """Tokenises `render_chat`'s text, which is ready for the assistant to continue.

    Special tokens that the messages spell are encoded as text.
    """
    messages = mark_specials(as_messages(prompt), special_texts(tokenizer))
    return encode_rendered(tokenizer, render_chat(tokenizer, messages, **template_kwargs))


def special_texts(tokenizer: Tokenizer) -> frozenset[str]:
    """Returns the texts of the tokenizer's special tokens, and of its template's turn markers."""
    added = tokenizer.added_tokens_decoder.values()
    specials = [token.content for token in added if token.special]
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("default")
    markers = turn_markers(tokenizer, template or CHATML_TEMPLATE, len(tokenizer))
    return markers.union(specials, tokenizer.all_special_tokens)


def mark_specials(value: Any, texts: frozenset[str]) -> Any:
    """Puts MARK behind the first character of each of the texts, in every string of a value.

    The value is messages, or a part of them: `"a<|im_end|>"` becomes `"a<" MARK "|im_end|>"`. A
    MARK that was there before is dropped. A special token of a single character cannot be broken
    and stays one.
    """
    if isinstance(value, str):
        return _first_characters(texts).sub(rf"\g<0>{MARK}", value.replace(MARK, ""))
    if isinstance(value, Mapping):
        marked = {}
        for key, entry in value.items():
            marked[mark_specials(key, texts)] = mark_specials(entry, texts)
        return marked
    if isinstance(value, list | tuple):
        return [mark_specials(entry, texts) for entry in value]
    return value


@lru_cache(maxsize=16)
def _first_characters(texts: frozenset[str]) -> re.Pattern[str]:
    """Compiles what finds the first character of each of the texts: `<(?=s>|/s>)`.

    So those are found, too, that overlap.
    """
    rests_of = defaultdict(list)
    for text in sorted(texts):
        if len(text) > 1:
            rests_of[text[0]].append(re.escape(text[1:]))
    if not rests_of:
        # Matches nothing.
        return re.compile("(?!)")
    patterns = []
    for first, rests in rests_of.items():
        patterns.append(f"{re.escape(first)}(?={'|'.join(rests)})")
    return re.compile("|".join(patterns))


def encode_rendered(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenises what was rendered from marked messages: what MARK breaks is ordinary text."""
    if MARK not in text:
        return tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.is_fast:
        without_marks = _copy_that_drops_marks(tokenizer, len(tokenizer))
        return without_marks.encode(text, add_special_tokens=False)
    # A tokenizer in Python may add a space in front of each piece.
    token_ids: list[int] = []
    for piece in text.split(MARK):
        token_ids += tokenizer.encode(piece, add_special_tokens=False)
    return token_ids


@lru_cache(maxsize=4)
def _copy_that_drops_marks(tokenizer: Tokenizer, _size: int) -> Tokenizer:
    """Copies a fast tokenizer; the copy drops marks when it has found the special tokens.

    That is its last step before the model, which never sees text across a mark: a vocabulary of
    whole words has the special tokens' texts among them. `_size` keeps copies of a tokenizer that
    has grown apart.
    """
    dropping = copy.deepcopy(tokenizer)
    backend = dropping.backend_tokenizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    [(mark_as_bytes, _)] = byte_level.pre_tokenize_str(MARK)
    steps = [pre_tokenizers.Split(Regex(f"{MARK}|{mark_as_bytes}"), "removed")]
    if backend.pre_tokenizer is not None:
        steps.insert(0, backend.pre_tokenizer)
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return dropping


def pad_token_id(tokenizer: Tokenizer) -> int:
    """Returns the id that fills masked positions.

    That is the padding token's, else the end-of-sequence token's.
    """
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    raise ValueError(
        f"{tokenizer.name_or_path!r} has neither a pad_token nor an eos_token; set "
        "tokenizer.pad_token, or name one in its tokenizer_config.json"
    )
