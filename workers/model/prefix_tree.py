"""Rows that begin with the same tokens: their common part is computed once, and each row's own tokens attend to it.

In the order of their tokens, rows share most with their neighbours. So one number a row says what is computed once in a
micro-batch: `shared`, the tokens that it has in common with the row before it.

    rows in order    a b c d e    shared 0        segments   ab | c | de | f | g     queries: its own tokens
                     a b c f      shared 3        keys of f  ab c f                  (the row up to there)
                     a b g        shared 2        keys of g  ab g

It may be the prompt of a group's samples, a system prompt, or what a template left of an episode's history. A token
costs the same wherever it is computed, and attention has fewer pairs; what sharing costs is that keys and values of a
path are copied to lie together, which `key_cost` weighs.

Invariant: every token of every row is computed in exactly one segment of its micro-batch, and attends to its own row.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise, takewhile
from typing import NamedTuple

import numpy as np

from training.batch.batching import ceildiv
from training.config import MicroBatching

# Copied keys and values whose memory, forward and backward, is about that of a token in a layer.
KEYS_PER_TOKEN = 16

# Rows in order, each with the number of tokens that it shares with the row before it.
MicroBatch = list[tuple[int, int]]


class Segments(NamedTuple):
    """Holds a micro-batch's tokens, laid out one segment behind the other.

    Attributes:
        parts: which tokens each segment holds: of which row, from where, and how many.
        keys: for each segment the places of its row's tokens up to its end.
        places: for each row, in the micro-batch's order, the places of its tokens.
    """

    parts: list[tuple[int, int, int]]
    keys: list[np.ndarray]
    places: list[np.ndarray]


def order_rows(tokens: Sequence[np.ndarray], key_cost: float | None) -> MicroBatch:
    """Orders rows (each (length,) integers) so that those that begin alike are neighbours.

    Args:
        key_cost: what a token's copied key and value cost, in tokens computed (`workers.model.forward.key_cost`); a row
            shares what it has in common with its neighbour where that is more than its copies cost. None: nothing.
    """
    if key_cost is None:
        return [(row, 0) for row in range(len(tokens))]
    # Big-endian bytes are ordered as the numbers are.
    keys = [row.astype(">u4").tobytes() for row in tokens]
    order = sorted(range(len(tokens)), key=keys.__getitem__)
    shared = [0, *(_common(tokens[before], tokens[row]) for before, row in pairwise(order))]
    return [(row, n if n > key_cost * len(tokens[row]) else 0) for row, n in zip(order, shared, strict=True)]


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Counts the tokens that two rows begin with alike."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def plan_packed(order: MicroBatch, lengths: Sequence[int], limits: MicroBatching) -> list[MicroBatch]:
    """Cuts ordered rows into few micro-batches within the limits, which count a shared token once; the largest first.

    KEYS_PER_TOKEN keys that segments read count as a token too, where they are more: they are copied, layer by layer.
    Rows that share something stay together as long as they fit; a row above the limit is a micro-batch of its own.
    """
    most_rows = limits.micro_batch_size or len(order)
    most = limits.max_token_len or sum(lengths)
    bins: list[tuple[int, MicroBatch]] = []
    for tokens, run in sorted(_runs(order, lengths, most, most_rows), key=lambda run: -run[0]):
        for i, (used, rows) in enumerate(bins):
            if used + tokens <= most and len(rows) + len(run) <= most_rows:
                bins[i] = (used + tokens, rows + run)
                break
        else:
            bins.append((tokens, run))
    return [rows for _, rows in sorted(bins, key=lambda packed: -packed[0])]


def _runs(order: MicroBatch, lengths: Sequence[int], most: int, most_rows: int) -> list[tuple[int, MicroBatch]]:
    """Lists runs of neighbours that share something, with their tokens, cut evenly where they are above the limits."""
    runs: list[MicroBatch] = []
    for row, shared in order:
        if not shared:
            runs.append([])
        runs[-1].append((row, shared))
    cut: list[tuple[int, MicroBatch]] = []
    for run in runs:
        total = _size(sum(lengths[row] - shared for row, shared in run), sum(lengths[row] for row, _ in run))
        parts = max(ceildiv(total, most), ceildiv(len(run), most_rows))
        own, keys, part = 0, 0, MicroBatch()
        for row, shared in run:
            more = lengths[row] - shared
            full = _size(own + more, keys + lengths[row]) > most or len(part) == most_rows
            if part and (full or (more and _size(own, keys) >= total / parts)):
                cut.append((_size(own, keys), part))
                own, keys, part, more, shared = 0, 0, MicroBatch(), lengths[row], 0
            own, keys, part = own + more, keys + lengths[row], [*part, (row, shared)]
        cut.append((_size(own, keys), part))
    return cut


def _size(own: int, keys: int) -> int:
    return max(own, ceildiv(keys, KEYS_PER_TOKEN))


def cut_segments(micro_batch: MicroBatch, lengths: Sequence[int]) -> Segments:
    """Cuts the rows of a micro-batch into segments, wherever one of them leaves the others."""
    segments = Segments([], [], [])
    # The segments of the row at hand: where each ends in the row, and the places of its tokens.
    path: list[tuple[int, np.ndarray]] = []
    total = 0
    for number, (row, shared) in enumerate(micro_batch):
        path = [(stop, places) for stop, places in path if stop <= shared]
        # Where later rows leave this one, as long as they share more of it than the row before does.
        later = takewhile(shared.__lt__, (n for _, n in micro_batch[number + 1 :]))
        for start, stop in pairwise(sorted({shared, *accumulate(later, min, initial=lengths[row])})):
            path.append((stop, np.arange(total, total + stop - start)))
            total += stop - start
            segments.parts.append((row, start, stop - start))
            segments.keys.append(_joined(path))
        segments.places.append(_joined(path))
    return segments


def _joined(path: list[tuple[int, np.ndarray]]) -> np.ndarray:
    return np.concatenate([places for _, places in path])
