"""A class of the user's as `agent.context`: called, and what it says checked.

Invariant: what it raises, or says that cannot be used, ends the run with a sentence: an episode
that is played again, or left out, would choose those that the class can handle.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from types import GeneratorType
from typing import Any

from custom.env import BadEnvironment, Message
from custom.env_calls import check_observation, located, raised, shown
from data.loading import load_object
from data.turn_tokens import TemplateRefusal
from workers.rollout.history import (
    Deciding,
    Decision,
    HistoryFault,
    HistoryRule,
    NewContext,
    Standing,
    Writing,
    Written,
)

ALLOWED = (
    "allowed: None to go on, a list of messages {'role': …, 'content': …} or a NewContext; a "
    "generator yields Writing before it returns one of them"
)
# A message of a history may be long: the prompt has its own limit.
MAX_CHARS = 10_000_000
# What a class has the policy write before one context, at most.
MAX_WRITINGS = 100
OWN = "own"


class OwnRule(HistoryRule):
    """Asks an object of the user's class.

    Args:
        place: FILE.py:CLASS.
        kwargs: of the class.
        response_length: tokens of a row's response, in which the class may reserve some.

    Raises:
        HistoryFault: the class cannot be made, or reserves what it may not.
    """

    def __init__(self, place: str, kwargs: dict[str, Any], response_length: int) -> None:
        self.place = place
        make = load_object(place, "context")
        try:
            self.rule: Any = make(**kwargs)
        except KeyboardInterrupt:
            raise
        # Whatever a user's class raises.
        except BaseException as error:
            raise HistoryFault(self._told(f"cannot be made: {raised(error, make)}")) from error
        reserved = getattr(self.rule, "reserved", 0)
        if type(reserved) is not int or not 0 <= reserved < response_length:
            raise HistoryFault(
                self._told(
                    f"{type(self.rule).__name__}.reserved={shown(reserved)}; allowed: the tokens "
                    f"that turns leave free in a row of {response_length} "
                    "(data.max_response_length), 0 or more, and fewer than those"
                )
            )
        self.reserved = reserved
        self.where = located(self.rule.next_context, f"{type(self.rule).__name__}.next_context")

    def next_context(self, standing: Standing) -> Decision | Deciding:
        """Returns what the class decides, checked."""
        # Messages of its own: what it writes there changes no record.
        shown_to_it = replace(
            standing,
            task=[dict(message) for message in standing.task],
            messages=[dict(message) for message in standing.messages],
            reply=[dict(message) for message in standing.reply],
        )
        answer = self._asked(self.rule.next_context, shown_to_it)
        if isinstance(answer, GeneratorType):
            return self._deciding(answer)
        return self._checked(answer)

    def _deciding(self, answer: Generator[Any, Any, Any]) -> Deciding:
        """Goes through what the class has the policy write, to what it returns."""
        written: Written | None = None
        for _ in range(MAX_WRITINGS + 1):
            asked = self._asked(_sent, answer, written)
            if isinstance(asked, StopIteration):
                return self._checked(asked.value, has_written=written is not None)
            written = yield self._checked_writing(asked)
        raise HistoryFault(
            self._told(
                f"{self.where} yielded more than {MAX_WRITINGS} times for one context, and would "
                "go on for ever: return the messages of the new one (what has no room is not "
                "asked, and answered by Written('', 0))"
            )
        )

    def _asked(self, function: Any, *arguments: Any) -> Any:
        """Calls the user's code. Raises HistoryFault: it raised."""
        try:
            return function(*arguments)
        # The template's word on messages is the episode's.
        except (TemplateRefusal, KeyboardInterrupt):
            raise
        except BaseException as error:
            told = raised(error, self.rule.next_context)
            raise HistoryFault(self._told(f"{self.where} raised {told}")) from error

    def _checked(self, answer: Any, has_written: bool = False) -> Decision:
        """Returns what the class decided. Raises HistoryFault: it cannot be used."""
        if answer is None and not has_written:
            return None
        if isinstance(answer, NewContext):
            messages = self._checked_messages(answer.messages)
            return NewContext(messages, str(answer.reason), str(answer.fault))
        if isinstance(answer, list):
            return NewContext(self._checked_messages(answer), OWN)
        text = shown(answer)
        if answer is None:
            text = "None behind a Writing, which a new context has to follow"
        raise HistoryFault(self._told(f"{self.where} returned {text}; {ALLOWED}"))

    def _checked_messages(self, messages: Any) -> list[Message]:
        try:
            checked = check_observation(messages, self.where, MAX_CHARS)
        except BadEnvironment as error:
            raise HistoryFault(self._told(f"{error}; {ALLOWED}")) from None
        if isinstance(checked, str) or not checked:
            raise HistoryFault(self._told(f"{self.where} returned {shown(messages)}; {ALLOWED}"))
        return checked

    def _checked_writing(self, writing: Any) -> Writing:
        if not isinstance(writing, Writing):
            raise HistoryFault(self._told(f"{self.where} yielded {shown(writing)}; {ALLOWED}"))
        is_purpose = isinstance(writing.purpose, str) and writing.purpose.isidentifier()
        if not is_purpose or not isinstance(writing.max_tokens, int) or writing.max_tokens < 1:
            raise HistoryFault(
                self._told(
                    f"{self.where} yielded {shown(writing)}; allowed: max_tokens of 1 or more, and "
                    "a purpose of one word"
                )
            )
        return writing._replace(
            messages=self._checked_messages(writing.messages), is_trained=bool(writing.is_trained)
        )

    def _told(self, what: str) -> str:
        """Says what decides contexts here, and what is wrong with it."""
        return f"agent.context={self.place}: {what}"


def _sent(answer: Generator[Any, Any, Any], written: Written | None) -> Any:
    """Returns what a generator yields next, or the StopIteration that ends it."""
    try:
        return answer.send(written)
    except StopIteration as end:
        return end
