"""Where each token of a response comes from: sampled, the environment's words, or the template's.

    response   A0 A1 A2 <end> | <end> \\n <user> \\n | 4  2 | <end> \\n <assistant> \\n | A3 A4
    origin      1  1  1   1       4    3    3     3   2  2     3    3      3      3     1  1

Between two sampled turns the chat template closes the one, writes the environment's messages and
opens the next. A message's tokens are found by the ids that its text has alone; those at its edges
may be joined with the template's, and are then the environment's. A row of a program that goes on
from the middle of another one begins with that row's tokens, of the same origins; what was sampled
there is copied here. Invariant: a token that cannot be told is the environment's, and its row says
so.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from data.chat_templates import MARK
from data.turn_tokens import TurnTokens
from workers.rollout.episode import Episode, Row, Turn

PADDING = 0
SAMPLED = 1
ENVIRONMENT = 2
TEMPLATE = 3
# The end of a turn that its limit cut: the policy did not sample it.
OVER_LIMIT = 4
# Sampled in the row that this one goes on from, and trained on there.
COPIED = 5
# Sampled in a turn that is not trained on, such as a summary with context.train_summaries=false.
UNTRAINED = 6
# Translates the origins of a row to those of the same tokens in a row that goes on from there.
AS_COPIED = bytes(COPIED if origin == SAMPLED else origin for origin in range(256))

SAMPLED_BYTE = bytes([SAMPLED])
UNTRAINED_BYTE = bytes([UNTRAINED])
ENVIRONMENT_BYTE = bytes([ENVIRONMENT])
# So many joins are remembered: environments repeat themselves.
NUM_REMEMBERED = 512
BYTES_OF_ID = array("i").itemsize
# How many tokens at a message's beginning and end may be joined with the template's.
JOINED = ((0, 0), (1, 0), (0, 1), (1, 1))
# A text of more characters is found by the first and the last PIECE of them, without so many tokens
# where these were cut off.
LONG_TEXT = 1024
PIECE = 256
TOKENS_AT_CUT = 8


class RowOrigins(NamedTuple):
    """Holds the origin of each token of a row's response, a byte each.

    `is_told` is False where the template's tokens could not be told from the environment's.
    """

    origins: bytes
    is_told: bool


class TokenOrigins:
    """Tells where the tokens of rows come from, under one tokenizer."""

    def __init__(self, tokens: TurnTokens) -> None:
        self.tokens = tokens
        self._find_remembered = lru_cache(NUM_REMEMBERED)(self._find)

    def of_episode(self, episode: Episode) -> list[RowOrigins]:
        """Tells the origins of each of an episode's rows, before a failure policy masks them."""
        told: list[RowOrigins] = []
        for row in episode.rows:
            beginning = self._beginning(row, told, episode)
            told.append(self.of_row(row, episode.turns, beginning))
        return told

    def of_row(
        self, row: Row, turns: Sequence[Turn], beginning: RowOrigins | None = None
    ) -> RowOrigins:
        """Tells the origins of a row's tokens.

        Args:
            turns: the episode's.
            beginning: of the tokens before the first that was sampled.
        """
        ids = row.ids
        spans = row.spans
        # Where each span's gap ends, and which turn follows there.
        ends = [span.start for span in spans[1:]] + [len(ids)]
        followers = [span.turn for span in spans[1:]] + [None]
        is_told = True
        pieces = [ENVIRONMENT_BYTE * (spans[0].start if spans else len(ids))]
        if beginning is not None:
            pieces = [beginning.origins]
            is_told = beginning.is_told
        for span, end, following in zip(spans, ends, followers, strict=False):
            is_trained = span.turn >= len(turns) or turns[span.turn].is_trained
            of_turn = SAMPLED_BYTE if is_trained else UNTRAINED_BYTE
            pieces.append(of_turn * (span.end - span.start))
            if end == span.end:
                continue
            found = self._of_gap(ids[span.end : end], turns, span.turn, following)
            if found is None:
                is_told = False
                found = ENVIRONMENT_BYTE * (end - span.end)
            pieces.append(found)
        return RowOrigins(b"".join(pieces), is_told)

    def _beginning(
        self, row: Row, told: Sequence[RowOrigins], episode: Episode
    ) -> RowOrigins | None:
        """Tells the origins of a row's tokens before the first sampled one, where it is a fork.

        Args:
            told: of the rows before this one.
        """
        forked = forked_from(row, episode)
        if forked is None:
            return None
        number, end = forked
        copied = told[number].origins[:end].translate(AS_COPIED)
        first = row.spans[0]
        behind = episode.turns[first.turn].behind
        assert behind is not None
        found = self._of_gap(row.ids[end : first.start], episode.turns, behind, first.turn)
        if found is None:
            unknown = bytes([ENVIRONMENT]) * (first.start - end)
            return RowOrigins(copied + unknown, is_told=False)
        return RowOrigins(copied + found, told[number].is_told)

    def _of_gap(
        self, gap: array[int], turns: Sequence[Turn], before: int, following: int | None
    ) -> bytes | None:
        """Tells the origins of what stands between two sampled turns; None: it cannot be told.

        Args:
            before, following: the turns' numbers; the row may end with the gap.
        """
        texts, is_cut = _said_after(turns, before)
        asked = None if following is None else turns[following].asked
        if asked is not None:
            if not asked:
                # The program gave ids.
                return None
            texts = tuple(str(message["content"]) for message in asked)
        return self._find_remembered(gap.tobytes(), texts, is_cut)

    def _find(self, gap: bytes, texts: tuple[str, ...], is_cut: bool) -> bytes | None:
        """Finds the texts of messages in the ids of a gap; None where one is not there."""
        origins = bytearray([TEMPLATE]) * (len(gap) // BYTES_OF_ID)
        begin = 0
        for text in texts:
            place = self._place_of(text, gap, begin, is_alone=len(texts) == 1)
            if place is None:
                return None
            first, begin = place
            origins[first:begin] = bytes([ENVIRONMENT]) * (begin - first)
        if is_cut:
            added = self._added_end(gap)
            origins[:added] = bytes([OVER_LIMIT]) * added
        return bytes(origins)

    def _place_of(
        self, text: str, gap: bytes, begin: int, *, is_alone: bool
    ) -> tuple[int, int] | None:
        """Finds the ids of a text in the gap, from the token `begin` on: its first and its end."""
        text = text.replace(MARK, "")
        if not text.strip():
            return begin, begin
        if len(text) > LONG_TEXT and is_alone:
            return self._place_of_long(text.strip(), gap, begin)
        for form in (text, text.strip()):
            ids = array("i", self.tokens.encode(form))
            for joined_ahead, joined_behind in JOINED:
                inner = ids[joined_ahead : len(ids) - joined_behind]
                if not inner:
                    continue
                first = find_ids(inner.tobytes(), gap, begin)
                if first is not None:
                    ahead = max(first - joined_ahead, begin)
                    behind = min(first + len(inner) + joined_behind, len(gap) // BYTES_OF_ID)
                    return ahead, behind
        return None

    def _place_of_long(self, text: str, gap: bytes, begin: int) -> tuple[int, int] | None:
        """Finds a long text by what its beginning and its end have as ids, away from the cuts."""
        head = array("i", self.tokens.encode(text[:PIECE]))[:-TOKENS_AT_CUT]
        tail = array("i", self.tokens.encode(text[-PIECE:]))[TOKENS_AT_CUT:]
        for joined_ahead, joined_behind in JOINED:
            inner_head = head[joined_ahead:].tobytes()
            inner_tail = tail[: len(tail) - joined_behind].tobytes()
            first = find_ids(inner_head, gap, begin) if inner_head else None
            last = rfind_ids(inner_tail, gap) if inner_tail else None
            if first is not None and last is not None and last >= first:
                end = last + len(inner_tail) // BYTES_OF_ID + joined_behind
                return max(first - joined_ahead, begin), end
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
    texts = tuple([str(message["content"]) for message in turn.reply.messages])
    return texts, turn.finish_reason == "length"


def forked_from(row: Row, episode: Episode) -> tuple[int, int] | None:
    """Returns the row that a program's row was forked from, and how much of its response it has.

    None: the row begins with a prompt of its own.
    """
    if not row.spans or row.spans[0].start == 0:
        return None
    behind = episode.turns[row.spans[0].turn].behind
    if behind is None:
        return None
    for number, earlier in enumerate(episode.rows):
        ends = [span.end for span in earlier.spans if span.turn == behind]
        if ends:
            return number, max(ends)
    return None


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


def rfind_ids(ids: bytes, among: bytes) -> int | None:
    """Finds the last place of ids in others; both as the bytes of an array of ints."""
    end = len(among)
    while True:
        start = among.rfind(ids, 0, end)
        if start < 0:
            return None
        if start % BYTES_OF_ID == 0:
            return start // BYTES_OF_ID
        end = start + len(ids) - 1
