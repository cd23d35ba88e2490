"""Where a program's request goes on: in a row of its episode, as a fork of one, or in a new row.

A program sends whole conversations and owes nobody that they grow. The chat template's text of
a request is compared with what the rows already read as:

    the request goes on                                          its answer is sampled
    where a row ends, and nobody else is sampled there           in that row, which grows by what is
                                                                 new (mask 0)
    behind an earlier answer of a row, or where another answer   in a new row: that row's own ids up
    is being sampled                                             to there (mask 0), and what is new
    behind none (first requests, sub-agents, compaction,         in a new row, whose prompt is the
    dropped thinking)                                            whole request

Invariant: a sampled token has mask 1 in exactly one row of its episode, and stands there behind the
very ids that the engine was given. What was sampled for a helper (helper_requests.py) has none: its
rows are kept apart, and a row that goes on from one holds it with mask 0. Sampled tokens are
compared by their text, in which white space does not count, because templates and clients strip it;
all other text counts as it is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from data.turn_tokens import Messages, TemplateRefusal, Tools, TurnTokens, squashed
from workers.rollout.episode import Row, TurnLimits
from workers.rollout.speaker import NOBODY, Speaker


class Piece(NamedTuple):
    """Holds a piece of what a row reads as: sampled, or rendered by the template."""

    text: str
    is_sampled: bool


@dataclass(eq=False)
class Mark:
    """Marks a row just behind a sampled turn.

    Attributes:
        turn: the turn's number in its episode.
        start: response ids that the row had before the turn and what was given for it.
        held: response ids of the row up to here.
        pieces: what the row reads as up to here; empty where only its ids are known.
        sampled: the turn's ids.
        is_used: a later request went on from here, so that its client has the answer.
    """

    row: Row
    turn: int
    start: int
    held: int
    pieces: tuple[Piece, ...]
    sampled: list[int]
    is_used: bool = False
    text: str = field(init=False)

    def __post_init__(self) -> None:
        self.text = "".join(piece.text for piece in self.pieces)


@dataclass(eq=False)
class RowPlace:
    """Describes where a request's answer is sampled: behind `given`, in `row`.

    Attributes:
        start: response ids that the row has without `given`.
        pieces: what the row then reads as.
        behind: the mark that the request goes on from; None: it begins a row.
        trained: the answer is; of a helper's it is not.
    """

    row: Row
    kind: Literal["grows", "forks", "begins"]
    start: int
    given: list[int]
    pieces: tuple[Piece, ...]
    behind: Mark | None = None
    trained: bool = True


@dataclass(eq=False)
class Conversations:
    """Keeps an episode's rows as the conversations that its program has.

    Attributes:
        marks: behind each sampled turn, in the order in which they were sampled.
        busy: rows whose next turn is being sampled.
        helpers: rows whose answers are not trained on.
    """

    tokens: TurnTokens
    limits: TurnLimits
    rows: list[Row]
    marks: list[Mark] = field(default_factory=list)
    busy: list[Row] = field(default_factory=list)
    helpers: list[Row] = field(default_factory=list)

    def place(
        self, messages: Messages, tools: Tools, speaker: Speaker = NOBODY, trained: bool = True
    ) -> RowPlace | None:
        """Finds a place with room for one token at least; changes nothing.

        Args:
            speaker: who asks; the request goes on in no other's rows.
            trained: the answer is; of a helper's it is not.

        Returns:
            None where there is no such place.

        Raises:
            TemplateRefusal: the chat template does not take the messages.
        """
        rendered = self._rendered(messages, tools)
        found = self._found(rendered, speaker, trained)
        if found is not None:
            mark, end, given = found
            pieces = (*mark.pieces, Piece(rendered[end:], is_sampled=False))
            place = self._behind(mark, given, pieces, trained)
            if place is not None:
                return place
            # The row is full; as a prompt the conversation may have room.
        pieces = (Piece(rendered, is_sampled=False),)
        return self._beginning(self.tokens.encode(rendered), pieces, speaker, trained)

    def _found(
        self, rendered: str, speaker: Speaker, trained: bool
    ) -> tuple[Mark, int, list[int]] | None:
        """Finds the mark that a request goes on from, where that ends in it, and what is new."""
        marks = self._marks_of(speaker, trained)
        for mark in sorted(marks, key=lambda mark: len(mark.text), reverse=True):
            end = end_of(mark, rendered)
            # An answer that was cut at `<` is not the beginning of the `<|im_end|>` behind another.
            if end is None or cuts_one_of(self.tokens.special_texts, rendered, end):
                continue
            given = self.tokens.following(rendered[end:], mark.sampled)
            if given is not None:
                return mark, end, given
        return None

    def turn_before(
        self, messages: Messages, tools: Tools, speaker: Speaker = NOBODY, trained: bool = True
    ) -> int | None:
        """Returns the turn that a request goes on from, whether or not there is room; None: none.

        Its client then has that answer, whatever becomes of the request.

        Raises:
            TemplateRefusal: the chat template does not take the messages.
        """
        found = self._found(self._rendered(messages, tools), speaker, trained)
        if found is None:
            return None
        mark, _, _ = found
        mark.is_used = True
        return mark.turn

    def _rendered(self, messages: Messages, tools: Tools) -> str:
        """Renders a request. Raises TemplateRefusal, whatever is in it."""
        try:
            return self.tokens.rendered(messages, tools)
        except TemplateRefusal:
            raise
        # A template is a program of the model's maker: what it makes of odd requests, nested a
        # thousand deep for one, is that request's fault alone.
        except Exception as error:
            raise TemplateRefusal(
                f"the chat template cannot render this request: {type(error).__name__}: {error}"
            ) from error

    def place_ids(
        self, prompt_ids: Sequence[int], speaker: Speaker = NOBODY, trained: bool = True
    ) -> RowPlace | None:
        """Does as `place` with the ids that are to be continued."""
        ids = list(prompt_ids)
        mark = self._found_by_ids(ids, speaker, trained)
        if mark is not None:
            place = self._behind(mark, ids[length_of(mark) :], (), trained)
            if place is not None:
                return place
        return self._beginning(ids, (), speaker, trained)

    def _found_by_ids(self, ids: list[int], speaker: Speaker, trained: bool) -> Mark | None:
        """Finds the mark that ids go on from."""
        for mark in sorted(self._marks_of(speaker, trained), key=length_of, reverse=True):
            known = [*mark.row.prompt_ids, *mark.row.ids[: mark.held]]
            if len(ids) > len(known) and ids[: len(known)] == known:
                return mark
        return None

    def turn_before_ids(
        self, prompt_ids: Sequence[int], speaker: Speaker = NOBODY, trained: bool = True
    ) -> int | None:
        """Does as `turn_before` with the ids that are to be continued."""
        mark = self._found_by_ids(list(prompt_ids), speaker, trained)
        if mark is None:
            return None
        mark.is_used = True
        return mark.turn

    def turns_of(self, speaker: Speaker) -> list[int]:
        """Lists the turns that a speaker has had answered."""
        return [mark.turn for mark in self.marks if mark.row.speaker == speaker]

    @property
    def speakers(self) -> list[Speaker]:
        """Lists who has had an answer, again for each."""
        return [mark.row.speaker for mark in self.marks]

    def _marks_of(self, speaker: Speaker, trained: bool) -> list[Mark]:
        """Lists the marks in a speaker's rows, those first whose rows the answer may be in."""
        marks = [mark for mark in self.marks if mark.row.speaker == speaker]
        if not self.helpers:
            return marks
        return sorted(marks, key=lambda mark: trained == is_among(mark.row, self.helpers))

    def _behind(
        self, mark: Mark, given: list[int], pieces: tuple[Piece, ...], trained: bool
    ) -> RowPlace | None:
        """Goes on behind a mark; None where the row has no room for more."""
        at_end = mark.held == len(mark.row.ids) and not is_among(mark.row, self.busy)
        if trained == is_among(mark.row, self.helpers):
            # A row is trained on, or it is a helper's.
            at_end = False
        row = mark.row if at_end else fork(mark.row, mark.held)
        if self.limits.room(row) <= len(given):
            return None
        kind: Literal["grows", "forks"] = "grows" if at_end else "forks"
        return RowPlace(row, kind, len(row.ids), given, pieces, mark, trained)

    def _beginning(
        self, prompt_ids: list[int], pieces: tuple[Piece, ...], speaker: Speaker, trained: bool
    ) -> RowPlace | None:
        """Begins a row; None where the prompt is too long."""
        row = Row(prompt_ids=prompt_ids, speaker=speaker)
        if len(prompt_ids) > self.limits.prompt_length or self.limits.room(row) <= 0:
            return None
        return RowPlace(row, "begins", 0, [], pieces, trained=trained)

    def enter(self, place: RowPlace) -> Row:
        """Takes a place; returns its row, which ends where the answer begins."""
        if place.kind != "grows":
            self.rows.append(place.row)
            if not place.trained:
                self.helpers.append(place.row)
        if place.behind is not None:
            place.behind.is_used = True
        place.row.append_tokens(place.given)
        self.busy.append(place.row)
        return place.row

    def leave(self, place: RowPlace, turn: int, sampled: list[int]) -> None:
        """Marks the row, which now has the answer of this turn."""
        self._free(place.row)
        pieces = place.pieces
        if pieces:
            text = self.tokens.as_rendered(self.tokens.text(sampled))
            pieces = (*pieces, Piece(text, is_sampled=True))
        self.marks.append(
            Mark(place.row, turn, place.start, len(place.row.ids), pieces, list(sampled))
        )

    def drop(self, place: RowPlace) -> None:
        """Gives up a place in which nothing was sampled; what was given goes with it."""
        self._free(place.row)
        self._shorten(place.row, place.start)

    def retract(self, turn: int) -> bool:
        """Takes a sampled turn out again that nobody took; returns whether it was there to take.

        It stays where a later request went on from it.
        """
        for mark in self.marks:
            if mark.turn != turn:
                continue
            if mark.is_used:
                return False
            self.marks.remove(mark)
            self._shorten(mark.row, mark.start)
            return True
        return False

    def drop_helpers(self) -> None:
        """Takes the rows of helpers out of the episode's."""
        self.rows[:] = [row for row in self.rows if not is_among(row, self.helpers)]

    def _free(self, row: Row) -> None:
        self.busy = [other for other in self.busy if other is not row]

    def _shorten(self, row: Row, length: int) -> None:
        """Cuts a row; without any sampled token it is no row of the episode's."""
        row.cut(length)
        if not row.spans:
            self.rows[:] = [other for other in self.rows if other is not row]


def fork(row: Row, held: int) -> Row:
    """Makes a row that begins as `row` does; what was sampled there is not trained on again."""
    new = Row(prompt_ids=list(row.prompt_ids), speaker=row.speaker, source=row.source)
    new.append_tokens(row.ids[:held].tolist())
    return new


def is_among(row: Row, rows: Sequence[Row]) -> bool:
    """Checks whether this very row, not one that is equal, is among others."""
    return any(other is row for other in rows)


def length_of(mark: Mark) -> int:
    """Counts the ids up to a mark."""
    return len(mark.row.prompt_ids) + mark.held


def end_of(mark: Mark, rendered: str) -> int | None:
    """Returns where `rendered` has said all that a row reads as up to a mark; None: it does not."""
    if not mark.pieces:
        return None
    if rendered.startswith(mark.text):
        return len(mark.text)
    place = 0
    for piece in mark.pieces:
        end = end_of_piece(piece, rendered, place)
        if end is None:
            return None
        place = end
    return place


def end_of_piece(piece: Piece, rendered: str, start: int) -> int | None:
    """Returns where `rendered`, from `start` on, has said a piece; None: it says something else.

    White space around a piece does not count, nor that inside of what was sampled.
    """
    text = piece.text.strip()
    begin = skip_space(rendered, start) if text else start
    if rendered.startswith(text, begin):
        return begin + len(text)
    if not piece.is_sampled:
        return None
    place = start
    for character in squashed(piece.text):
        place = skip_space(rendered, place)
        if place >= len(rendered) or rendered[place] != character:
            return None
        place += 1
    return place


def cuts_one_of(words: Iterable[str], text: str, place: int) -> bool:
    """Checks whether a place of a text lies inside of one of these words."""
    for word in words:
        around = len(word) - 1
        if word in text[max(place - around, 0) : place + around]:
            return True
    return False


def skip_space(text: str, place: int) -> int:
    """Returns the place of the first character from there on that is no white space."""
    while place < len(text) and text[place].isspace():
        place += 1
    return place
