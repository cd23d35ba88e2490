"""What rows share of their beginnings, and how packed rows are cut into segments.

Rows that begin with the same tokens share them: their common part is computed once, and each row's
own tokens attend to it. In the order of their tokens rows share most with their neighbours. So one
number a row says what is computed once in a micro-batch: `shared`, the tokens that it has in common
with the row before it.

    rows in order    a b c d e    shared 0        segments   ab | c | de | f | g
                     a b c f      shared 3        keys of f  ab c f
                     a b g        shared 2        keys of g  ab g

A segment's queries are its own tokens, and its keys those of the row up to there. A row that begins
with the whole row before it goes on with that one's last segment:

    rows in order    a b c       shared 0        segments   abcd | e
                     a b c d     shared 3        keys of e  abc e
                     a b c e     shared 3

What rows share may be the prompt of a group's samples, a system prompt, or what a template left of
an episode's history. A token costs the same wherever it is computed, and attention has fewer pairs;
what sharing costs is that the keys and values that a segment reads are copied to lie together,
which `key_cost` weighs.

Invariant: every token of every row is computed in exactly one segment of its micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from transformers import PretrainedConfig

from training.batch.rank_layout import ceildiv
from training.config import MicroBatching

# What an H100 computes while it moves a byte, in bfloat16 at 40 % of its peak; fewer on other
# devices.
FLOPS_PER_BYTE = 120
# Queries that a kernel takes at a time.
KERNEL_BLOCK = 128
# Copied keys and values whose memory, forward and backward, is about that of a token in a layer.
KEYS_PER_TOKEN = 16


class PackedRow(NamedTuple):
    """Holds a row's number and the tokens that it shares with the row before it."""

    row: int
    shared: int


# Rows in the order in which they are packed.
MicroBatch = list[PackedRow]


class Segment(NamedTuple):
    """Holds which tokens are a segment: of which row, from where, and how many."""

    row: int
    start: int
    length: int


@dataclass
class Segments:
    """Holds a micro-batch's tokens, laid out one segment behind the other.

    Attributes:
        parts: the segments, in order.
        keys: for each segment the places of its row's tokens up to its end.
        places: for each row, in the micro-batch's order, the places of its tokens.
    """

    parts: list[Segment] = field(default_factory=list)
    keys: list[np.ndarray] = field(default_factory=list)
    places: list[np.ndarray] = field(default_factory=list)


def key_cost(config: PretrainedConfig) -> float:
    """Returns the cost of a key that a segment reads in a copy, in tokens computed.

    It is that of a layer, forward and backward.

    A token costs about 72 h^2 floating-point operations: 12 h^2 weights, six each. A copy of key
    and value, each w numbers, moves about 24 w bytes (read, written, and the same for a gradient
    that is added up in float32), each worth FLOPS_PER_BYTE operations. And one more segment leaves
    half a block of KERNEL_BLOCK queries empty, 12 h operations for each of its keys.
    """
    settings = config.to_dict()
    hidden = config.hidden_size
    heads = config.num_attention_heads
    key_heads = settings.get("num_key_value_heads") or heads
    head_size = settings.get("head_dim") or hidden // heads
    width = key_heads * head_size
    copied = 24 * width * FLOPS_PER_BYTE
    left_empty = KERNEL_BLOCK / 2 * 12 * hidden
    return (copied + left_empty) / (72 * hidden**2)


def order_rows(tokens: Sequence[np.ndarray], key_cost: float | None) -> MicroBatch:
    """Orders rows (each (length,) integers) so that those that begin alike are neighbours.

    Args:
        key_cost: what a token's copied key and value cost, in tokens computed (`key_cost`); a row
            shares what it has in common with the row before it where that is more than its copies
            cost. None: rows share nothing.
    """
    if key_cost is None:
        return [PackedRow(row, 0) for row in range(len(tokens))]
    # Big-endian bytes are ordered as the numbers are.
    sort_keys = [row.astype(">u4").tobytes() for row in tokens]
    order = sorted(range(len(tokens)), key=sort_keys.__getitem__)
    ordered = [PackedRow(order[0], 0)]
    for before, row in pairwise(order):
        shared = _common(tokens[before], tokens[row])
        if shared <= key_cost * len(tokens[row]):
            shared = 0
        ordered.append(PackedRow(row, shared))
    return ordered


def count_unique(tokens: Sequence[np.ndarray]) -> int:
    """Counts the tokens of rows (each (length,) integers), those that begin alike once.

    That is the least that any micro-batch of the rows could compute.
    """
    if not tokens:
        return 0
    sharing = order_rows(tokens, key_cost=0.0)
    return sum(len(tokens[row]) - shared for row, shared in sharing)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Counts the tokens that two rows begin with alike."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


@dataclass
class Run:
    """Holds neighbouring rows that share something, and what they cost.

    Attributes:
        tokens: that are computed, a shared one once.
        keys: that segments read: the whole length of every row.
    """

    rows: MicroBatch = field(default_factory=list)
    tokens: int = 0
    keys: int = 0

    def add(self, row: PackedRow, length: int) -> None:
        """Adds a row of this length behind the others; the first one shares nothing."""
        if not self.rows:
            row = PackedRow(row.row, 0)
        self.rows.append(row)
        self.tokens += length - row.shared
        self.keys += length

    @property
    def size(self) -> int:
        """Returns what counts towards a micro-batch's limit; see `run_size`."""
        return run_size(self.tokens, self.keys)


def run_size(tokens: int, keys: int) -> int:
    """Counts towards a micro-batch's limit: tokens, or keys if those take more memory.

    KEYS_PER_TOKEN keys count as a token.
    """
    return max(tokens, ceildiv(keys, KEYS_PER_TOKEN))


@dataclass
class _Bin:
    """Holds the runs of a micro-batch that is being filled."""

    size: int = 0
    rows: MicroBatch = field(default_factory=list)

    def add(self, run: Run) -> None:
        self.size += run.size
        self.rows += run.rows


def plan_packed(
    order: MicroBatch, lengths: Sequence[int], limits: MicroBatching
) -> list[MicroBatch]:
    """Cuts ordered rows into few micro-batches within the limits; the largest first.

    A shared token counts once. Keys that segments read are copied, layer by layer, and count as
    well (`run_size`). Rows that share something stay together as long as they fit; a row above the
    limit is a micro-batch of its own.
    """
    most_rows = limits.micro_batch_size or len(order)
    most_tokens = limits.max_token_len or sum(lengths)
    runs = _runs(order, lengths, most_tokens, most_rows)
    bins: list[_Bin] = []
    for run in sorted(runs, key=lambda run: -run.size):
        first_fit = _first_with_room(bins, run, most_tokens, most_rows)
        if first_fit is None:
            first_fit = _Bin()
            bins.append(first_fit)
        first_fit.add(run)
    bins.sort(key=lambda filled: -filled.size)
    return [filled.rows for filled in bins]


def _first_with_room(
    bins: Sequence[_Bin], run: Run, most_tokens: int, most_rows: int
) -> _Bin | None:
    for candidate in bins:
        size_fits = candidate.size + run.size <= most_tokens
        if size_fits and len(candidate.rows) + len(run.rows) <= most_rows:
            return candidate
    return None


def _runs(order: MicroBatch, lengths: Sequence[int], most_tokens: int, most_rows: int) -> list[Run]:
    """Lists runs of neighbours that share something; those above the limits are cut evenly."""
    starts = [place for place, row in enumerate(order) if not row.shared]
    runs: list[Run] = []
    for start, stop in pairwise([*starts, len(order)]):
        runs += _cut_evenly(order[start:stop], lengths, most_tokens, most_rows)
    return runs


def _cut_evenly(
    rows: MicroBatch, lengths: Sequence[int], most_tokens: int, most_rows: int
) -> list[Run]:
    """Cuts rows that share something into runs within the limits, of about the same size."""
    whole = Run()
    for row in rows:
        whole.add(row, lengths[row.row])
    parts = max(ceildiv(whole.size, most_tokens), ceildiv(len(rows), most_rows))
    runs = [Run()]
    for row in rows:
        run = runs[-1]
        length = lengths[row.row]
        added = length - row.shared
        too_large = run_size(run.tokens + added, run.keys + length) > most_tokens
        full = too_large or len(run.rows) == most_rows
        # A row that repeats the one before it adds no token, and stays with it.
        has_its_share = added > 0 and run.size >= whole.size / parts
        if run.rows and (full or has_its_share):
            run = Run()
            runs.append(run)
        run.add(row, length)
    return runs


@dataclass
class _PathPart:
    """Holds a segment of a row: where it ends in the row, and the places of its tokens."""

    stop: int
    places: np.ndarray

    def ends_at(self, total: int) -> bool:
        """Checks whether its last token is the last of so many that are placed."""
        return int(self.places[-1]) == total - 1


def cut_segments(micro_batch: MicroBatch, lengths: Sequence[int]) -> Segments:
    """Cuts the rows of a micro-batch into segments, wherever one of them leaves the others.

    Args:
        lengths: of the rows, by the numbers that `micro_batch` gives them.
    """
    segments = Segments()
    path: list[_PathPart] = []
    total = 0
    for number, (row, shared) in enumerate(micro_batch):
        # What the row has in common with the one before is in segments already.
        path = [part for part in path if part.stop <= shared]
        cuts = _cuts(shared, lengths[row], micro_batch[number + 1 :])
        for start, stop in pairwise(cuts):
            goes_on = bool(path) and start == shared and path[-1].ends_at(total)
            length = stop - start
            path.append(_PathPart(stop, np.arange(total, total + length)))
            total += length
            if goes_on:
                # Nothing else is copied that one segment of both would not copy.
                start = segments.parts.pop().start
                segments.keys.pop()
            segments.parts.append(Segment(row, start, stop - start))
            segments.keys.append(_joined(path))
        segments.places.append(_joined(path))
    return segments


def _cuts(shared: int, length: int, later_rows: MicroBatch) -> list[int]:
    """Lists where segments of a row's own tokens begin, and its end: later rows leave it there.

    They do as long as they share more of the row than it shares with the one before it.
    """
    cuts = {shared, length}
    in_common = length
    for _, later_shared in later_rows:
        if later_shared <= shared:
            break
        in_common = min(in_common, later_shared)
        cuts.add(in_common)
    return sorted(cuts)


def _joined(path: Sequence[_PathPart]) -> np.ndarray:
    return np.concatenate([part.places for part in path])
