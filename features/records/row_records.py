"""The rows of a batch's episodes as the run's episode files hold them: packed arrays, and parents.

    rows       r0            r1
    lengths    3             2
    tokens     a0  a0  e0  | a0  a0          (T,) of all rows, one behind another
    turn_ids   0   0   -1  | 0   0

Rows are many and short, so that what is derived of their tokens is computed for all rows at once,
and cut in rows at the end. Invariant: records are plain data, as JSON holds it.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from data.packed_arrays import PackedArray, pack_parts, pack_typed
from features.records.token_origins import OVER_LIMIT, TEMPLATE, RowOrigins, forked_from
from workers.rollout.episode import Episode, Row, Span

# Translates origins to 1 on what the template added, and 0.
IS_TEMPLATE = bytes(int(origin in (TEMPLATE, OVER_LIMIT)) for origin in range(256))


def row_records(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Returns the records of rows, which are packed as they are asked for.

    What the failure policy takes from rows, their spans and rewards, is read at once.

    Yields:
        Each row in packed arrays, with an entry a token. Log-probs are 0 on what nobody sampled;
        `weight_versions` are there where tokens of several occur, `seam` where a new context
        begins, `aside` where the environment asked for the row, with the `speaker` that earns by
        itself, "" where it does not; `template_mask` and `parent` are null: `complete_rows` fills
        them in.
    """
    lengths = [len(row.ids) for row in rows]
    sampled = _SampledTokens.of(rows, lengths)
    turn_ids = sampled.spread(sampled.turns)
    columns = zip(
        rows,
        pack_parts(turn_ids >= 0, "|i1", lengths),
        pack_parts(turn_ids, "<i2", lengths),
        pack_parts(_rewards(rows, lengths), "<f4", lengths),
        strict=True,
    )
    return _pack_rows(columns, sampled.several_versions(lengths))


def _pack_rows(
    columns: Iterable[tuple[Row, PackedArray, PackedArray, PackedArray]],
    versions: Mapping[int, PackedArray],
) -> Iterator[dict[str, Any]]:
    for number, (row, response_mask, turn_ids, rewards) in enumerate(columns):
        record: dict[str, Any] = {
            "prompt_ids": pack_typed(array("i", row.prompt_ids)),
            "response_ids": pack_typed(row.ids),
            "response_mask": response_mask,
            "log_probs": pack_typed(row.log_probs),
            "turn_ids": turn_ids,
            "rewards": rewards,
            "template_mask": None,
            "parent": None,
        }
        if number in versions:
            record["weight_versions"] = versions[number]
        if row.seam is not None:
            record["seam"] = row.seam._asdict()
        if row.aside:
            record |= {"aside": True, "speaker": row.speaker.agent}
        yield record


def complete_rows(
    records: Sequence[dict[str, Any]], episode: Episode, origins: Sequence[RowOrigins]
) -> None:
    """Fills in what an episode's rows have of each other, and of their tokens' origins.

    Args:
        records: of the episode's rows.
        origins: of each row's tokens; empty: they are not told.
    """
    for record, of_row in zip(records, origins, strict=False):
        if of_row.is_told:
            is_template = array("b", of_row.origins.translate(IS_TEMPLATE))
            record["template_mask"] = pack_typed(is_template)
    if len(records) == 1:
        return
    parents = parents_of(episode.rows)
    if any(turn.asked is not None and (turn.aside or not turn.writes) for turn in episode.turns):
        parents = parents_in_program(episode, parents)
    for record, parent in zip(records, parents, strict=True):
        record["parent"] = parent


@dataclass(frozen=True)
class _SampledTokens:
    """Holds the spans (S,) of all rows, and what was sampled (N,) of their tokens (T,).

    Attributes:
        size: T.
        rows, turns, versions: (S,) of the spans.
        lengths: (S,) tokens of each.
        places: (N,) where the sampled tokens lie among all.
    """

    size: int
    rows: np.ndarray
    turns: np.ndarray
    versions: np.ndarray
    lengths: np.ndarray
    places: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Row], row_lengths: Sequence[int]) -> "_SampledTokens":
        """Collects the spans of rows of so many tokens."""
        spans = chain.from_iterable(row.spans for row in rows)
        numbers = np.fromiter(chain.from_iterable(spans), np.int64)
        starts, ends, turns, versions = numbers.reshape(-1, len(Span._fields)).T
        of_row = np.repeat(np.arange(len(rows)), [len(row.spans) for row in rows])
        sizes = np.array(row_lengths, np.int64)
        row_begins = np.cumsum(sizes) - sizes
        lengths = ends - starts
        # A span's place among all tokens, less that among the sampled ones.
        shifts = row_begins[of_row] + starts - (np.cumsum(lengths) - lengths)
        places = np.arange(lengths.sum()) + np.repeat(shifts, lengths)
        return cls(sum(row_lengths), of_row, turns, versions, lengths, places)

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Gives the spans' values to their tokens: (T,) int32, -1 on what nobody sampled."""
        spread = np.full(self.size, -1, np.int32)
        spread[self.places] = np.repeat(values, self.lengths)
        return spread

    def several_versions(self, row_lengths: Sequence[int]) -> dict[int, PackedArray]:
        """Packs the versions of the rows, by number, that have tokens of several."""
        first_spans = np.searchsorted(self.rows, self.rows)
        differs = self.versions != self.versions[first_spans]
        if not differs.any():
            return {}
        packed = list(pack_parts(self.spread(self.versions), "<i4", row_lengths))
        return {number: packed[number] for number in np.unique(self.rows[differs]).tolist()}


def _rewards(rows: Sequence[Row], lengths: Sequence[int]) -> np.ndarray:
    """Returns the reward at each token of all rows: (T,) float32."""
    rewards = np.zeros(sum(lengths), np.float32)
    begin = 0
    for row, length in zip(rows, lengths, strict=True):
        for position, reward in row.reward_at.items():
            rewards[begin + position] = reward
        begin += length
    return rewards


def parents_of(rows: Sequence[Row]) -> list[dict[str, int] | None]:
    """Finds, for each row, the earlier row whose ids it begins with, and how many these are.

    Rewritten histories and branches share what came before them; None: there is no such row.
    """
    ids = [np.array(row.token_ids, dtype=np.int64) for row in rows]
    parents: list[dict[str, int] | None] = []
    for number, own in enumerate(ids):
        shared = [common_length(own, earlier) for earlier in ids[:number]]
        longest = max(shared, default=0)
        # The last one of several, from which the conversation went on.
        last = len(shared) - 1 - shared[::-1].index(longest) if longest else 0
        parents.append({"row": last, "tokens": longest} if longest else None)
    return parents


def parents_in_program(
    episode: Episode, parents: Sequence[dict[str, int] | None]
) -> list[dict[str, int] | None]:
    """Corrects the parents of a program's rows.

    A fork's parent is the row that it was forked from. All conversations begin with a few tokens of
    the template's, and helpers with the same system message: a row that was begun anew has a parent
    only where it has all of that one's prompt, as where thinking was dropped.
    """
    corrected: list[dict[str, int] | None] = []
    for row, parent in zip(episode.rows, parents, strict=True):
        forked = forked_from(row, episode)
        if forked is not None:
            number, length = forked
            parent = {"row": number, "tokens": len(row.prompt_ids) + length}
        elif parent and parent["tokens"] < len(episode.rows[parent["row"]].prompt_ids):
            parent = None
        corrected.append(parent)
    return corrected


def common_length(first: np.ndarray, second: np.ndarray) -> int:
    """Counts the entries with which both arrays begin alike."""
    shorter = min(len(first), len(second))
    differs = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(differs[0]) if len(differs) else shorter
