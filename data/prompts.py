"""Prompts: from chat messages to token ids, always by the tokenizer's own chat template.

Special tokens come from the template alone (`add_special_tokens=False`), so a begin-of-sequence token is never doubled.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def _say_chatml_is_used(tokenizer_name: str) -> None:
    logger.warning("tokenizer %r has no chat template; prompts are rendered as ChatML", tokenizer_name)


def as_messages(prompt: str | Sequence[Message]) -> list[Message]:
    """Makes one user message of a plain string; a list of messages stays as it is."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str | Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    **template_kwargs: Any,
) -> str:
    """Renders a conversation by the tokenizer's chat template, or as ChatML where it has none.

    Args:
        prompt: chat messages (`role`, `content`), or one user message as a string.
        add_generation_prompt: whether the text ends with what starts the assistant's turn.
        template_kwargs: variables of the template, such as `tools` or `enable_thinking`.
    """
    if tokenizer.chat_template is None and "chat_template" not in template_kwargs:
        _say_chatml_is_used(tokenizer.name_or_path)
        template_kwargs["chat_template"] = CHATML_TEMPLATE
    return tokenizer.apply_chat_template(
        as_messages(prompt), tokenize=False, add_generation_prompt=add_generation_prompt, **template_kwargs
    )


def encode_chat(
    tokenizer: "PreTrainedTokenizerBase", prompt: str | Sequence[Message], **template_kwargs: Any
) -> list[int]:
    """Tokenises `render_chat`'s text, which is ready for the assistant to continue."""
    return tokenizer.encode(render_chat(tokenizer, prompt, **template_kwargs), add_special_tokens=False)


def pad_token_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Returns the id that fills masked positions: the padding token's, else the end-of-sequence token's."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    raise ValueError(
        f"tokenizer {tokenizer.name_or_path!r} has neither a pad_token nor an eos_token; set tokenizer.pad_token"
    )
