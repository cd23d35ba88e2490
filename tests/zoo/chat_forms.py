"""Chat templates after the forms of model families, and the tokenizers that know their tokens.

The templates are written for the zoo: the markers and their order are a family's, the rest is as
short as it can be. Invariant: a tokenizer has one token a word, and its vocabulary has VOCABULARY
tokens, whatever the form.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

VOCABULARY = 96
# What the game says, and what answers it.
WORDS = ["guess", "higher", "lower", "correct", "no", "number", *(str(n) for n in range(12))]
ROLES = ["system", "user", "assistant", "model", "tool", "observation", "final", "analysis"]


@dataclass(frozen=True, kw_only=True)
class ChatForm:
    """Describes how a family writes a conversation.

    Attributes:
        specials: its special tokens, without the padding token.
        ends_turn: the one that ends an assistant's turn.
        bos: the one that begins a text; None: nothing does.
    """

    specials: tuple[str, ...]
    ends_turn: str
    template: str
    bos: str | None = None


def one_marker(opens: str, closes: str, *, before: str = "", assistant: str = "assistant") -> str:
    """Writes a template whose turns are all `opens`, text, `closes`; ROLE in `opens` is the role.

    Args:
        before: what begins the conversation.
    """
    role = "{{ m['role'] }}"
    if assistant != "assistant":
        role = "{{ '" + assistant + "' if m['role'] == 'assistant' else m['role'] }}"
    turn = opens.replace("ROLE", role) + "{{ m['content'] }}" + closes
    reply = opens.replace("ROLE", assistant)
    return (
        before
        + "{% for m in messages %}"
        + turn
        + "{% endfor %}{% if add_generation_prompt %}"
        + reply
        + "{% endif %}"
    )


def two_markers(user: str, assistant: str, closes: str, *, before: str = "") -> str:
    """Writes a template with a marker for each side, where only an assistant's turn is closed."""
    return (
        before
        + "{% for m in messages %}{% if m['role'] == 'assistant' %}"
        + assistant
        + "{{ m['content'] }}"
        + closes
        + "{% else %}"
        + user
        + "{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + assistant
        + "{% endif %}"
    )


FORMS: dict[str, ChatForm] = {
    "chatml": ChatForm(
        specials=("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>"),
        ends_turn="<|im_end|>",
        template=one_marker("<|im_start|>ROLE\n", "<|im_end|>\n"),
    ),
    "llama3": ChatForm(
        specials=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        ends_turn="<|eot_id|>",
        bos="<|begin_of_text|>",
        template=one_marker(
            "<|start_header_id|>ROLE<|end_header_id|>\n\n", "<|eot_id|>", before="<|begin_of_text|>"
        ),
    ),
    "gemma": ChatForm(
        specials=("<bos>", "<start_of_turn>", "<end_of_turn>"),
        ends_turn="<end_of_turn>",
        bos="<bos>",
        template=one_marker(
            "<start_of_turn>ROLE\n", "<end_of_turn>\n", before="<bos>", assistant="model"
        ),
    ),
    "mistral": ChatForm(
        specials=("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
        ends_turn="</s>",
        bos="<s>",
        template=(
            "<s>{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}</s>"
            "{% else %}[INST]{{ m['content'] }}[/INST]{% endif %}{% endfor %}"
        ),
    ),
    "glm": ChatForm(
        specials=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        ends_turn="<|end|>",
        template=one_marker("<|ROLE|>\n", "<|end|>", before="[gMASK]<sop>"),
    ),
    "deepseek": ChatForm(
        specials=("<|begin|>", "<|User|>", "<|Assistant|>", "<|end|>"),
        ends_turn="<|end|>",
        bos="<|begin|>",
        template=two_markers("<|User|>", "<|Assistant|>", "<|end|>", before="<|begin|>"),
    ),
    "kimi": ChatForm(
        specials=(
            "<|im_system|>",
            "<|im_user|>",
            "<|im_assistant|>",
            "<|im_middle|>",
            "<|im_end|>",
        ),
        ends_turn="<|im_end|>",
        template=one_marker("<|im_ROLE|>ROLE<|im_middle|>", "<|im_end|>"),
    ),
    "harmony": ChatForm(
        specials=("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
        ends_turn="<|end|>",
        template=one_marker("<|start|>ROLE<|message|>", "<|end|>"),
    ),
    "phi": ChatForm(
        specials=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        ends_turn="<|end|>",
        template=one_marker("<|ROLE|>", "<|end|>"),
    ),
    "granite": ChatForm(
        specials=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        ends_turn="<|end_of_text|>",
        template=one_marker("<|start_of_role|>ROLE<|end_of_role|>", "<|end_of_text|>\n"),
    ),
    "minimax": ChatForm(
        specials=("]~b]", "[e~["),
        ends_turn="[e~[",
        template=one_marker("]~b]ROLE\n", "[e~[\n"),
    ),
    "seed": ChatForm(
        specials=("<seed:bos>", "<seed:eos>"),
        ends_turn="<seed:eos>",
        template=one_marker("<seed:bos>ROLE\n", "<seed:eos>"),
    ),
    "hunyuan": ChatForm(
        specials=("<|hy_begin|>", "<|hy_User|>", "<|hy_Assistant|>", "<|hy_end|>"),
        ends_turn="<|hy_end|>",
        template=two_markers(
            "<|hy_User|>", "<|hy_Assistant|>", "<|hy_end|>", before="<|hy_begin|>"
        ),
    ),
    "ernie": ChatForm(
        specials=("<s>", "</s>"),
        ends_turn="</s>",
        template=two_markers("<s>user ", "\nassistant ", "</s>"),
    ),
}


def make_tokenizer(form: str) -> PreTrainedTokenizerFast:
    """Makes the tokenizer of a form, with its chat template."""
    chat = FORMS[form]
    words = ["<pad>", *chat.specials, "<unk>", *ROLES, *WORDS]
    words += [f"extra{number}" for number in range(VOCABULARY - len(words))]
    numbered = {word: number for number, word in enumerate(words)}
    core = Tokenizer(WordLevel(numbered, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token=chat.ends_turn,
        bos_token=chat.bos,
        additional_special_tokens=list(chat.specials),
        chat_template=chat.template,
    )
