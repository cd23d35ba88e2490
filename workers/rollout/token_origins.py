"""Where each token of a response comes from: sampled, the environment's words, or the template's.

    response   A0 A1 A2 <end> | <end> \\n <user> \\n | 4  2 | <end> \\n <assistant> \\n | A3 A4
    origin      1  1  1   1       4    3    3     3   2  2     3    3      3      3     1  1

Between two sampled turns the chat template closes the one, writes the environment's messages and
opens the next. A message's tokens are found by the ids that its text has alone; those at its edges
may be joined with the template's, and are then the environment's. Invariant: a token that cannot be
told is the environment's, and its row says so.
"""

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from data.chat_templates import MARK
from data.turn_tokens import TurnTokens
from workers.rollout.episode import Episode, Row, Turn

PADDING = 0
SAMPLED = 1
ENVIRONMENT = 2
TEMPLATE = 3
# The end of a turn that its limit cut: the policy did not sample it.
OVER_LIMIT = 4

# So many joins are remembered: environments repeat themselves.
NUM_REMEMBERED = 512
BYTES_OF_ID = array("i").itemsize
# How many tokens at a message's edges may be joined with the template's.
MOST_JOINED = 1


class RowOrigins(NamedTuple):
    """Holds the origin of each token of a row's response, (tokens,) int8.

    `is_told` is False where the template's tokens could not be told from the environment's.
    """

    origins: np.ndarray
    is_told: bool


class TokenOrigins:
    """Tells where the tokens of rows come from, under one tokenizer."""

    def __init__(self, tokens: TurnTokens) -> None:
        self.tokens = tokens
        self._of_gap = lru_cache(NUM_REMEMBERED)(self._find)

    def of_episode(self, episode: Episode) -> list[RowOrigins]:
        """Tells the origins of each of an episode's rows, before a failure policy masks them."""
        return [self.of_row(row, episode.turns) for row in episode.rows]

    def of_row(self, row: Row, turns: Sequence[Turn]) -> RowOrigins:
        """Tells the origins of a row's tokens; `turns` are the episode's."""
        size = len(row.ids)
        origins = np.full(size, ENVIRONMENT, np.int8)
        is_told = True
        spans = row.spans
        for number, span in enumerate(spans):
            origins[span.start : span.end] = SAMPLED
            end = spans[number + 1].start if number + 1 < len(spans) else size
            if end == span.end:
                continue
            found = self._of_gap(row.ids[span.end : end].tobytes(), *_said_after(turns, span.turn))
            if found is None:
                is_told = False
            else:
                origins[span.end : end] = found
        return RowOrigins(origins, is_told)

    def _find(self, gap: bytes, texts: tuple[str, ...], is_cut: bool) -> np.ndarray | None:
        """Finds the texts of messages in the ids of a gap; None where one is not there."""
        origins = np.full(len(gap) // BYTES_OF_ID, TEMPLATE, np.int8)
        begin = 0
        for text in texts:
            place = self._place_of(text, gap, begin)
            if place is None:
                return None
            first, begin = place
            origins[first:begin] = ENVIRONMENT
        if is_cut:
            origins[: self._added_end(gap)] = OVER_LIMIT
        return origins

    def _place_of(self, text: str, gap: bytes, begin: int) -> tuple[int, int] | None:
        """Finds the ids of a text in the gap, from the token `begin` on: its first and its end."""
        text = text.replace(MARK, "")
        if not text.strip():
            return begin, begin
        for form in (text, text.strip()):
            ids = array("i", self.tokens.encode(form))
            for joined_ahead, joined_behind in ((0, 0), (MOST_JOINED, 0), (0, MOST_JOINED), (1, 1)):
                inner = ids[joined_ahead : len(ids) - joined_behind]
                if not inner:
                    continue
                first = find_ids(inner.tobytes(), gap, begin)
                if first is not None:
                    ahead = max(first - joined_ahead, begin)
                    behind = min(first + len(inner) + joined_behind, len(gap) // BYTES_OF_ID)
                    return ahead, behind
        return None

    def _added_end(self, gap: bytes) -> int:
        """Counts the tokens up to the end of turn that stands first in a gap; 0 without one."""
        ids = array("i", gap)
        for place, token_id in enumerate(ids):
            if token_id in self.tokens.eos_token_ids:
                return place + 1
        return 0


def _said_after(turns: Sequence[Turn], number: int) -> tuple[tuple[str, ...], bool]:
    """Returns the texts that answered a turn, and whether the turn was cut by its limit."""
    if number >= len(turns):
        return (), False
    turn = turns[number]
    if turn.reply is None:
        return (), turn.finish_reason == "length"
    texts = tuple(str(message["content"]) for message in turn.reply.messages)
    return texts, turn.finish_reason == "length"


def find_ids(ids: bytes, among: bytes, begin: int) -> int | None:
    """Finds ids in others, from the place `begin` on; both as the bytes of an array of ints."""
    start = begin * BYTES_OF_ID
    while True:
        start = among.find(ids, start)
        if start < 0:
            return None
        if start % BYTES_OF_ID == 0:
            return start // BYTES_OF_ID
        start += 1
