"""Prompts: from chat messages to token ids, always by the tokenizer's own chat template.

Special tokens come from the template alone: a begin-of-sequence token is never doubled (`add_special_tokens=False`),
and where a message spells one, as "<|im_end|>", it is encoded as the ordinary text that it is and ends no turn.
"""

import copy
import functools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tokenizers import Regex, pre_tokenizers

from data.texts import say, warn_once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

Message = Mapping[str, Any]
Messages = Sequence[Message]
# Chat messages, or one user message.
Prompt = str | Messages
Tokenizer: TypeAlias = "PreTrainedTokenizerBase"
Processor: TypeAlias = "ProcessorMixin | None"

# Breaks a special token's text in messages, `<` MARK `|im_end|>`; a noncharacter of Unicode, which texts do not have.
MARK = "\ufdd0"

CHATML_TEMPLATE = Path(__file__).with_name("chatml.jinja").read_text(encoding="utf-8")


def as_messages(prompt: Prompt) -> list[Message]:
    """Makes one user message of a plain string; a list of messages stays as it is."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def render_chat(tokenizer: Tokenizer, prompt: Prompt, **template_kwargs: Any) -> str:
    """Renders a conversation by the tokenizer's chat template, or as ChatML where it has none.

    Args:
        prompt: chat messages (`role`, `content`), or one user message as a string.
        template_kwargs: variables of the template, such as `tools` or `enable_thinking`; unless
            `add_generation_prompt=False` is among them, the text ends with what starts the assistant's turn.
    """
    if tokenizer.chat_template is None and "chat_template" not in template_kwargs:
        warn_once(__name__, say("no_template", name=tokenizer.name_or_path))
        template_kwargs["chat_template"] = CHATML_TEMPLATE
    variables = {"add_generation_prompt": True, **template_kwargs}
    return tokenizer.apply_chat_template(as_messages(prompt), tokenize=False, **variables)


def encode_chat(tokenizer: Tokenizer, prompt: Prompt, **template_kwargs: Any) -> list[int]:
    """Tokenises `render_chat`'s text, which is ready for the assistant to continue.

    Special tokens that the messages spell are encoded as text.
    """
    messages = marked(as_messages(prompt), special_texts(tokenizer))
    return encode_rendered(tokenizer, render_chat(tokenizer, messages, **template_kwargs))


def special_texts(tokenizer: Tokenizer) -> frozenset[str]:
    """Returns the texts of the tokenizer's special tokens."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return frozenset([*added, *tokenizer.all_special_tokens])


def marked(value: Any, texts: frozenset[str]) -> Any:
    """Puts MARK behind the first character of each of the texts, in every string of messages or of a part of them.

    `"a<|im_end|>"` becomes `"a<" MARK "|im_end|>"`. A MARK that was there before is dropped. A special token of a
    single character cannot be broken and stays one.
    """
    if isinstance(value, str):
        return _beginnings(texts).sub(rf"\g<0>{MARK}", value.replace(MARK, ""))
    if isinstance(value, Mapping):
        return {marked(key, texts): marked(entry, texts) for key, entry in value.items()}
    return [marked(entry, texts) for entry in value] if isinstance(value, list | tuple) else value


@functools.lru_cache(maxsize=16)
def _beginnings(texts: frozenset[str]) -> re.Pattern[str]:
    """Compiles what finds the first character of each of the texts, of those too that overlap: `<(?=s>|/s>)`."""
    rests = defaultdict(list)
    for text in sorted(text for text in texts if len(text) > 1):
        rests[text[0]].append(re.escape(text[1:]))
    return re.compile("|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()) or "(?!)")


def encode_rendered(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenises what was rendered from marked messages: what MARK breaks is ordinary text."""
    if MARK not in text:
        return tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.is_fast:
        return _that_drops_marks(tokenizer, len(tokenizer)).encode(text, add_special_tokens=False)
    # A tokenizer in Python may add a space in front of each piece.
    return [token for piece in text.split(MARK) for token in tokenizer.encode(piece, add_special_tokens=False)]


@functools.lru_cache(maxsize=4)
def _that_drops_marks(tokenizer: Tokenizer, _size: int) -> Tokenizer:
    """Copies a fast tokenizer; the copy drops marks as its last step before the model, when special tokens are found.

    The model never sees text across a mark: a vocabulary of whole words has the special tokens' texts among them.
    """
    dropping = copy.deepcopy(tokenizer)
    backend = dropping.backend_tokenizer
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(MARK)[0][0]
    steps = [backend.pre_tokenizer, pre_tokenizers.Split(Regex(f"{MARK}|{as_bytes}"), "removed")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([step for step in steps if step is not None])
    return dropping


def pad_token_id(tokenizer: Tokenizer) -> int:
    """Returns the id that fills masked positions: the padding token's, else the end-of-sequence token's."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    raise ValueError(f"{tokenizer.name_or_path!r} has neither a pad_token nor an eos_token; set tokenizer.pad_token")
