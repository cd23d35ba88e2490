"""Conversations in token space: what the policy sampled stays as ids, only what comes after it is tokenised.

    row of a two-turn episode      prompt | sampled 0 | joined 0 | sampled 1
    response_mask                           1 … 1       0 … 0      1 … 1

`joined` is the chat template's own text behind an assistant's turn (its end marker, where the model did not sample
it), the new messages and the next generation prompt, tokenised by itself.

Only the template opens and closes turns: a special token that an environment, a tool or the policy spells in its text
is encoded as the ordinary text that it is, and ends no turn (`marked`).

Special tokens come from the template alone, in prompts too: a begin-of-sequence token is never doubled
(`add_special_tokens=False`).

Invariant: sampled ids are never made again from text. Where a template renders the earlier turns differently once
the conversation goes on (Qwen3 drops thinking, Mistral moves the tools), nothing can be joined: the whole prompt, as
the template now has it, starts a new row.
"""

import copy
import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from jinja2 import TemplateError
from tokenizers import Regex, pre_tokenizers

from data.texts import say, warn_once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

logger = logging.getLogger(__name__)
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


@lru_cache(maxsize=16)
def _beginnings(texts: frozenset[str]) -> re.Pattern[str]:
    """Compiles what finds the first character of each of the texts, of those too that overlap: `<(?=s>|/s>)`."""
    rests = defaultdict(list)
    for text in sorted(text for text in texts if len(text) > 1):
        rests[text[0]].append(re.escape(text[1:]))
    return re.compile(
        "|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())
        or "(?!)"
    )


def encode_rendered(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenises what was rendered from marked messages: what MARK breaks is ordinary text."""
    if MARK not in text:
        return tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.is_fast:
        return _that_drops_marks(tokenizer, len(tokenizer)).encode(text, add_special_tokens=False)
    # A tokenizer in Python may add a space in front of each piece.
    return [
        token
        for piece in text.split(MARK)
        for token in tokenizer.encode(piece, add_special_tokens=False)
    ]


@lru_cache(maxsize=4)
def _that_drops_marks(tokenizer: Tokenizer, _size: int) -> Tokenizer:
    """Copies a fast tokenizer; the copy drops marks as its last step before the model, when special tokens are found.

    The model never sees text across a mark: a vocabulary of whole words has the special tokens' texts among them.
    """
    dropping = copy.deepcopy(tokenizer)
    backend = dropping.backend_tokenizer
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
        MARK
    )[0][0]
    steps = [backend.pre_tokenizer, pre_tokenizers.Split(Regex(f"{MARK}|{as_bytes}"), "removed")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([step for step in steps if step is not None])
    return dropping


def pad_token_id(tokenizer: Tokenizer) -> int:
    """Returns the id that fills masked positions: the padding token's, else the end-of-sequence token's."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    raise ValueError(
        f"{tokenizer.name_or_path!r} has neither a pad_token nor an eos_token; set tokenizer.pad_token"
    )


# Conversations

Tools = Sequence[dict[str, Any]] | None

# They stand for a turn's text where a rendering must not depend on it; plain letters, which no template changes.
PLACEHOLDER = "textofthisturn"
REPLY = "textofthereply"


class TemplateRefusal(ValueError):
    """Says that the chat template does not take a conversation: its roles, their order, or what is in them."""


class Join(NamedTuple):
    """Says how a conversation goes on behind a sampled turn.

    Attributes:
        token_ids: to append behind the sampled ids, none of them sampled; empty where the history is rewritten.
        rewritten: None, or the ids of the whole new prompt, with which a new row starts.
    """

    token_ids: list[int]
    rewritten: list[int] | None = None


def fold_system_message(messages: Messages) -> list[Message]:
    """Puts the system message's text in front of the first user message, for templates that refuse the role.

    `[system "Be brief.", user "2 + 2?"]` becomes `[user "Be brief.\\n\\n2 + 2?"]`. Without a user message behind it,
    the system message becomes one.
    """
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    system, *rest = messages
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [{**system, "role": "user"}, *rest]


class TurnTokens:
    """Turns conversations into token ids, and ids into text, under one tokenizer's chat template.

    A system message that the template refuses is folded into the first user message, in every method.

    Args:
        template_kwargs: variables of the template, such as `enable_thinking`.
        eos_token_ids: the ids at which sampling stops.
    Raises: TemplateRefusal, from every method that renders, where the template refuses a conversation.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, template_kwargs: dict[str, Any], eos_token_ids: Sequence[int]
    ) -> None:
        self.tokenizer, self.name = tokenizer, tokenizer.name_or_path
        self.template_kwargs = dict(template_kwargs)
        self.eos_token_ids = frozenset(eos_token_ids)

    def prompt(self, messages: Messages, tools: Tools = None) -> list[int]:
        """Returns the ids that the model is asked to continue: all messages and the generation prompt."""
        return self._encode(self._render(messages, tools))

    def text(self, token_ids: Sequence[int]) -> str:
        """Decodes a sampled turn as its environment reads it.

        Left out are the ids that stop sampling, the tokenizer's named special tokens (bos, eos, pad, …) and the special
        tokens that the template writes itself around turns. Other markers stay, special or not: `<tool_call>`,
        `[TOOL_CALLS]` and `<think>` are for parsers. A MARK is left out too, as the template would not render it.
        """
        return self._decode(
            [token_id for token_id in token_ids if token_id not in self._silent_ids]
        ).replace(MARK, "")

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
        The history counts as rewritten unless the new rendering is the prompt's text, then the sampled text, then
        what stands behind any assistant's turn; white space does not count, because templates strip turns.
        """
        sampled = list(sampled_ids)
        text = self.text(sampled)
        before = self._render(messages, tools).rstrip()
        after = self._render([*messages, _assistant(text), *new_messages], tools)
        closing = self._closing(messages, new_messages, tools)
        if closing is None or not _consists_of(
            after, before, marked(text, self._silent_texts), closing
        ):
            return Join([], self._encode(after))
        return Join(self._without_sampled_end(self._encode(closing), sampled))

    def check_template(
        self, *, tools: Tools = None, reply_roles: Sequence[Sequence[str]] = (("user",),)
    ) -> None:
        """Joins conversations of two turns and compares them with the template's own rendering, tokenised at once.

        What costs quality but not exactness is logged: a tokenizer that cuts the text differently where two turns meet,
        a template that drops tools, a turn whose end does not stop sampling.

        Args:
            reply_roles: for each kind of reply that environments give, the roles of its messages; `("tool", "user")`
                is the result of a tool and then an observation.
        Raises: ValueError, with the fault of the template, where it cannot render or continue such a conversation.
        """
        for roles in reply_roles:
            self._check_conversation(roles, tools)
        if not self.eos_token_ids.intersection(self._end_ids):
            end = self._decode(self._end_ids)
            logger.warning(
                "the chat template of %r ends turns with %r, where sampling does not stop",
                self.name,
                end,
            )
        if tools and self._render([_user("Hello")], tools) == self._render([_user("Hello")]):
            logger.warning(
                "the chat template of %r ignores tools=; describe them in the system message",
                self.name,
            )

    def _check_conversation(self, roles: Sequence[str], tools: Tools) -> None:
        messages: list[Message] = [
            {"role": "system", "content": "Be brief."},
            _user("What is 2 + 2?"),
        ]
        row = self.prompt(messages, tools)
        for answer, cut in (("It is four.", False), ("It stays four", True)):
            reply = [_message(role, f"{role} asks: is {answer!r} right?") for role in roles]
            following = [*messages, _assistant(answer), *reply]
            self._check_texts(following, tools)
            sampled = self._as_sampled(messages, answer, following, tools)
            sampled += [] if cut else self._through_stop(self._end_ids) or self._end_ids
            join = self.join(messages, sampled, reply, tools)
            row = row + sampled + join.token_ids if join.rewritten is None else join.rewritten
            self._check_row(row, self.prompt(following, tools))
            messages = following

    def _check_texts(self, messages: Messages, tools: Tools) -> None:
        rendered = self._render(messages, tools)
        for message in (message for message in messages if message["content"] not in rendered):
            role, roles = message["role"], ", ".join(str(message["role"]) for message in messages)
            fault = f"the chat template of {self.name!r} leaves out the {role} message in a conversation of {roles}"
            if role != "system":
                raise ValueError(
                    f"{fault}; let the environment answer in another role, or set another template"
                )
            logger.warning("%s", fault)

    def _as_sampled(
        self, messages: Messages, answer: str, following: Messages, tools: Tools
    ) -> list[int]:
        """Returns the ids of an answer as the template would have them behind the prompt."""
        before, after = self._render(messages, tools), self._render(following, tools)
        start = len(before.rstrip())
        if not after.startswith(before.rstrip()):
            return self._encode(answer)
        header = after[start : after.index(answer, start)]
        if header.strip() and before == self._render(messages, tools, add_generation_prompt=False):
            raise ValueError(say("no_header", name=self.name, header=header))
        prompt_ids, ids = self._encode(before), self._encode(after[:start] + header + answer)
        return (
            ids[len(prompt_ids) :] if ids[: len(prompt_ids)] == prompt_ids else self._encode(answer)
        )

    def _check_row(self, row: list[int], full: list[int]) -> None:
        if row == full:
            return
        place = _common_length(row, full)
        joined, whole = (self._decode(ids[max(place - 4, 0) : place + 4]) for ids in (row, full))
        if _squashed(self._decode(row)) != _squashed(self._decode(full)):
            raise ValueError(say("joined_otherwise", name=self.name, joined=joined, whole=whole))
        logger.warning(
            "%r tokenises the boundary of two turns differently: %r, at once %r",
            self.name,
            joined,
            whole,
        )

    def _render(
        self, messages: Messages, tools: Tools = None, *, add_generation_prompt: bool = True
    ) -> str:
        if messages and messages[0]["role"] == "system" and not self.accepts_system:
            messages = fold_system_message(messages)
        return self._render_as_is(
            self._marked(messages), marked(tools, self._special_texts), add_generation_prompt
        )

    def _marked(self, messages: Messages) -> list[Message]:
        """Marks the special tokens that messages spell.

        The policy's turns keep those that it may have sampled for its environment to read, such as `[TOOL_CALLS]`.
        """
        own, others = self._silent_texts, self._special_texts
        return [
            marked(message, own if message.get("role") == "assistant" else others)
            for message in messages
        ]

    def _render_as_is(self, messages: Messages, tools: Tools, add_generation_prompt: bool) -> str:
        variables = (
            self.template_kwargs
            if tools is None
            else {**self.template_kwargs, "tools": list(tools)}
        )
        try:
            return render_chat(
                self.tokenizer, messages, add_generation_prompt=add_generation_prompt, **variables
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateRefusal(
                say("template_refuses", name=self.name, roles=roles, error=error)
            ) from error

    def _render_if_taken(self, messages: Messages, add_generation_prompt: bool) -> str:
        with suppress(ValueError):
            return self._render_as_is(messages, None, add_generation_prompt)
        return ""

    def _encode(self, text: str) -> list[int]:
        # An environment may hand over halves of surrogate pairs, which no tokenizer takes.
        clean = text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
        return encode_rendered(self.tokenizer, clean)

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    @cached_property
    def accepts_system(self) -> bool:
        """Tells whether the template renders a system message; logged where it does not."""
        probe = [{"role": "system", "content": PLACEHOLDER}, _user("Hello")]
        accepted = PLACEHOLDER in self._render_if_taken(probe, True)
        if not accepted:
            logger.warning(say("no_system", name=self.name))
        return accepted

    def _closing(
        self, messages: Messages, new_messages: Messages, tools: Tools, **options: Any
    ) -> str | None:
        """Returns what the template renders behind an assistant's text; None where it leaves that text out."""
        placeholder = PLACEHOLDER
        given = str([self._marked([*messages, *new_messages]), tools])
        while placeholder in given:
            placeholder += "x"
        parts = self._render(
            [*messages, _assistant(placeholder), *new_messages], tools, **options
        ).split(placeholder)
        return parts[1] if len(parts) == 2 else None

    @cached_property
    def _end_ids(self) -> list[int]:
        """Holds the tokens that end an assistant's turn: `<|im_end|>`, newline."""
        last = self._closing([_user("Hello")], [], None, add_generation_prompt=False) or ""
        # Some templates close only turns that others follow.
        inner = (
            self._closing([_user("Hello")], [_user(REPLY)], None, add_generation_prompt=False) or ""
        )
        return max(
            self._encode(last), self._through_stop(self._encode(inner.split(REPLY)[0])), key=len
        )

    def _through_stop(self, token_ids: list[int]) -> list[int]:
        """Returns the ids up to the first that stops sampling; none without one."""
        end = next(
            (place for place, token_id in enumerate(token_ids) if token_id in self.eos_token_ids),
            -1,
        )
        return token_ids[: end + 1]

    def _without_sampled_end(self, closing_ids: list[int], sampled: list[int]) -> list[int]:
        """Returns closing_ids without the end-of-turn tokens that were sampled.

        With the end-of-turn tokens E1 E2: behind `… E1` comes `E2 …`; behind a turn cut by its limit `E1 E2 …`.
        """
        end = closing_ids[: _common_length(closing_ids, self._end_ids)]
        for length in range(min(len(end), len(sampled)), 0, -1):
            if sampled[-length:] == end[:length]:
                return closing_ids[length:]
        # Llama 2's template writes a space before </s>, models do not.
        stopped = sampled and sampled[-1] in self.eos_token_ids and sampled[-1] in end
        return closing_ids[end.index(sampled[-1]) + 1 :] if stopped else closing_ids

    @cached_property
    def _silent_ids(self) -> frozenset[int]:
        named = [
            token for token in self.tokenizer.special_tokens_map.values() if isinstance(token, str)
        ]
        special = {
            token_id
            for token_id, token in self.tokenizer.added_tokens_decoder.items()
            if token.special
        }
        # A template of one turn only still has text to read.
        turns = self._render_if_taken([_user("Hello"), _assistant("Hello"), _user("Hello")], False)
        written = special.intersection(self._encode(turns))
        return self.eos_token_ids.union(self.tokenizer.convert_tokens_to_ids(named), written)

    @cached_property
    def _special_texts(self) -> frozenset[str]:
        # Some models stop at an added token that is not declared special.
        added = self.tokenizer.added_tokens_decoder.items()
        return special_texts(self.tokenizer) | {
            token.content for place, token in added if place in self.eos_token_ids
        }

    @cached_property
    def _silent_texts(self) -> frozenset[str]:
        to_id = self.tokenizer.convert_tokens_to_ids
        return frozenset(text for text in self._special_texts if to_id(text) in self._silent_ids)


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


_user, _assistant = partial(_message, "user"), partial(_message, "assistant")


def _consists_of(rendered: str, before: str, text: str, closing: str) -> bool:
    """Tells whether rendered is before + text + closing, up to the white space around and in the text."""
    middle = len(rendered) - len(closing)
    if middle < len(before) or not (rendered.startswith(before) and rendered.endswith(closing)):
        return False
    return _squashed(rendered[len(before) : middle]) == _squashed(text)


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Measures the common prefix."""
    pairs = zip(first, second, strict=False)
    return next(
        (place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second))
    )


def _squashed(text: str) -> str:
    return "".join(text.split())
