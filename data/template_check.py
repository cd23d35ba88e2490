"""The trial of a chat template: turns joined by it read as its own rendering of them does."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from data.chat_templates import Message, Messages
from data.turn_ends import REPLY, common_length
from data.turn_tokens import Tools, TurnTokens, squashed

logger = logging.getLogger(__name__)


def check_template(
    turns: TurnTokens, *, tools: Tools = None, reply_roles: Sequence[Sequence[str]] = (("user",),)
) -> None:
    """Joins conversations of two turns and compares them with the template's own rendering.

    What costs quality but not exactness is logged: a tokenizer that cuts the text differently
    where two turns meet, a template that drops thinking or tools, a turn whose end does not
    stop sampling.

    Args:
        reply_roles: for each kind of reply that environments give, the roles of its messages;
            `("tool", "user")` is the result of a tool and then an observation.
    Raises: ValueError, with the fault of the template, where it cannot render or continue such
        a conversation.
    """
    for roles in reply_roles:
        _check_conversation(turns, roles, tools)
    if not turns.eos_token_ids.intersection(turns.ends.end_ids):
        end = turns.decode(turns.ends.end_ids)
        logger.warning(
            "the chat template of %r ends turns with %r, where sampling does not stop",
            turns.name,
            end,
        )
    if tools and turns.rendered([_user("Hello")], tools) == turns.rendered([_user("Hello")]):
        logger.warning(
            "the chat template of %r ignores tools=; describe them in the system message",
            turns.name,
        )
    if any(_moves_thinking(turns, roles, tools) for roles in reply_roles):
        logger.info(
            "the chat template of %r drops or moves earlier thinking: such turns start new rows",
            turns.name,
        )


def _moves_thinking(turns: TurnTokens, roles: Sequence[str], tools: Tools) -> bool:
    """Checks whether a reply in these roles makes the template rewrite a turn with thinking."""
    thinking = turns.encode("<think>\nHm.\n</think>\n\nYes.")
    reply = [_message(role, REPLY) for role in roles]
    return turns.join([_user("Hello")], thinking, reply, tools).rewritten is not None


def _check_conversation(turns: TurnTokens, roles: Sequence[str], tools: Tools) -> None:
    messages: list[Message] = [
        {"role": "system", "content": "Be brief."},
        _user("What is 2 + 2?"),
    ]
    row = turns.prompt(messages, tools)
    for answer, is_cut in (("It is four.", False), ("It stays four", True)):
        reply = [_message(role, f"{role} asks: is {answer!r} right?") for role in roles]
        following = [*messages, _assistant(answer), *reply]
        _check_texts(turns, following, tools)
        sampled = _as_sampled(turns, messages, answer, following, tools)
        if not is_cut:
            sampled += _end_before(turns, messages, reply, tools)
        join = turns.join(messages, sampled, reply, tools)
        if join.rewritten is None:
            row = row + sampled + join.token_ids
        else:
            row = join.rewritten
        _check_row(turns, row, turns.prompt(following, tools))
        messages = following


def _end_before(turns: TurnTokens, messages: Messages, reply: Messages, tools: Tools) -> list[int]:
    """Returns the tokens by which a turn ends that this reply answers."""
    ends = turns.ends.through_stop(turns.ends.end_ids) or turns.ends.end_ids
    if not turns.ends.turn_ends:
        return ends
    closing = turns.encode(turns.closing(messages, reply, tools) or "")
    return closing[:1] if turns.eos_token_ids.intersection(closing[:1]) else ends


def _check_texts(turns: TurnTokens, messages: Messages, tools: Tools) -> None:
    """Requires that the template renders every message; a system message may be left out."""
    rendered = turns.rendered(messages, tools)
    roles = ", ".join(str(message["role"]) for message in messages)
    for message in messages:
        if message["content"] in rendered:
            continue
        role = message["role"]
        fault = (
            f"the chat template of {turns.name!r} leaves out the {role} message in a "
            f"conversation of {roles}"
        )
        if role != "system":
            raise ValueError(
                f"{fault}; let the environment answer in another role, or set another template"
            )
        logger.warning("%s", fault)


def _as_sampled(
    turns: TurnTokens, messages: Messages, answer: str, following: Messages, tools: Tools
) -> list[int]:
    """Returns the ids of an answer as the template would have them behind the prompt."""
    before = turns.rendered(messages, tools)
    after = turns.rendered(following, tools)
    start = len(before.rstrip())
    if not after.startswith(before.rstrip()):
        return turns.encode(answer)
    header = after[start : after.index(answer, start)]
    if header.strip() and before == turns.rendered(messages, tools, add_generation_prompt=False):
        raise ValueError(
            f"the chat template of {turns.name!r} writes {header!r} before an assistant's text, "
            "but not with add_generation_prompt=True; set a template that starts the "
            "assistant's turn"
        )
    prompt_ids = turns.encode(before)
    ids = turns.encode(after[:start] + header + answer)
    if ids[: len(prompt_ids)] != prompt_ids:
        return turns.encode(answer)
    return ids[len(prompt_ids) :]


def _check_row(turns: TurnTokens, row: list[int], full: list[int]) -> None:
    """Compares a row of joined turns with the template's rendering, tokenised at once."""
    if row == full:
        return
    place = common_length(row, full)
    around = slice(max(place - 4, 0), place + 4)
    joined = turns.decode(row[around])
    whole = turns.decode(full[around])
    if squashed(turns.decode(row)) != squashed(turns.decode(full)):
        raise ValueError(
            f"turns joined under the chat template of {turns.name!r} read {joined!r} where the "
            f"template itself has {whole!r}; set a template that renders every turn alike"
        )
    logger.warning(
        "%r tokenises the boundary of two turns differently: %r, at once %r",
        turns.name,
        joined,
        whole,
    )


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _user(text: str) -> Message:
    return _message("user", text)


def _assistant(text: str) -> Message:
    return _message("assistant", text)
