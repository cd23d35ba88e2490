"""The tokens by which a chat template ends an assistant's turn, beside those that were sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from data.chat_templates import Message, Messages

# It stands for the text of a reply, where a rendering must not depend on it; plain letters, which
# no template changes.
REPLY = "textofthereply"


class TurnEnds:
    """Holds what ends a turn, and says what of it is still to be written behind a sampled one.

    Args:
        closing_before: gives what the template renders behind an assistant's text that these
            messages answer; None where it leaves that text out.
        encode: tokenises what was rendered.
        eos_token_ids: the ids at which sampling stops.
    """

    def __init__(
        self,
        closing_before: Callable[[Messages], str | None],
        *,
        encode: Callable[[str], list[int]],
        eos_token_ids: frozenset[int],
    ) -> None:
        self._closing_before = closing_before
        self._encode = encode
        self.eos_token_ids = eos_token_ids

    @cached_property
    def end_ids(self) -> list[int]:
        """Holds the tokens that end an assistant's turn: `<|im_end|>`, newline."""
        at_the_end = self._closing_before([]) or ""
        # Some templates close only turns that others follow.
        before_a_reply = self._closing_before([_message("user")])
        closing, *_ = (before_a_reply or "").split(REPLY)
        candidates = [self._encode(at_the_end), self.through_stop(self._encode(closing))]
        return max(candidates, key=len)

    def through_stop(self, token_ids: list[int]) -> list[int]:
        """Returns the ids up to the first that stops sampling; none without one."""
        for place, token_id in enumerate(token_ids):
            if token_id in self.eos_token_ids:
                return token_ids[: place + 1]
        return []

    def without_sampled(self, closing_ids: list[int], sampled: list[int]) -> list[int]:
        """Returns closing_ids without the end-of-turn tokens that were sampled.

        With the end-of-turn tokens E1 E2: behind `… E1` comes `E2 …`; behind a turn cut by its
        limit `E1 E2 …`.
        """
        end = closing_ids[: common_length(closing_ids, self.end_ids)]
        for length in range(min(len(end), len(sampled)), 0, -1):
            if sampled[-length:] == end[:length]:
                return closing_ids[length:]
        # The marker of the next role ends a turn, whichever role that is.
        if sampled and closing_ids[:1] == sampled[-1:] and sampled[-1] in self.eos_token_ids:
            return closing_ids[1:]
        # Llama 2's template writes a space before </s>, models do not.
        if sampled and sampled[-1] in self.eos_token_ids and sampled[-1] in end:
            return closing_ids[end.index(sampled[-1]) + 1 :]
        return closing_ids

    def ends_otherwise(self, closing_ids: Sequence[int], sampled: Sequence[int]) -> bool:
        """Checks whether a turn ended by another marker than the template has before this reply.

        GLM ends a turn by <|user|> or <|observation|>: one that said <|user|> and is answered by a
        tool would have both. gpt-oss ends its last turn by <|return|>, and earlier ones by <|end|>.
        """
        if not sampled or not closing_ids or sampled[-1] not in self.eos_token_ids:
            return False
        return sampled[-1] in self.turn_ends and closing_ids[0] in self.turn_ends - {sampled[-1]}

    @cached_property
    def turn_ends(self) -> frozenset[int]:
        """Holds what the template writes behind a turn, where that depends on what follows."""
        replies: list[list[Message]] = [[], [_message("user")], [_message("tool")]]
        ends: set[int] = set()
        for reply in replies:
            try:
                closing = self._closing_before(reply)
            # A template refuses roles in its own ways.
            except (ValueError, LookupError):
                continue
            ends.update(self._encode(closing or "")[:1])
        depends = len(ends) > 1 and not ends.isdisjoint(self.eos_token_ids)
        return frozenset(ends) if depends else frozenset()


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Measures the common prefix."""
    for place, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return place
    return min(len(first), len(second))


def _message(role: str) -> Message:
    return {"role": role, "content": REPLY}
