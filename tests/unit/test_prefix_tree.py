"""What rows share: every token computed once, each row attending to itself, within limits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from training.config import MicroBatching
from workers.model.shared_prefix import (
    KEYS_PER_TOKEN,
    MicroBatch,
    Segments,
    count_unique,
    cut_segments,
    key_cost,
    order_rows,
    plan_packed,
)

# Few different tokens, so that rows often begin alike, or are the same.
ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)
NO_LIMIT = MicroBatching(max_token_len=10**6)


def arrays(rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.int64) for row in rows]


def prefixes(rows: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    return {tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)}


def packed_tokens(
    segments: Segments, micro: MicroBatch, rows: Sequence[Sequence[int]]
) -> list[int]:
    return [
        token
        for row, start, n in segments.parts
        for token in rows[micro[row][0]][start : start + n]
    ]


def laid_out(micro: MicroBatch, rows: Sequence[Sequence[int]]) -> Segments:
    return cut_segments(
        [(i, shared) for i, (_, shared) in enumerate(micro)], [len(rows[row]) for row, _ in micro]
    )


@pytest.mark.seconds
@given(ROWS)
@settings(max_examples=300, deadline=None)
def test_each_different_beginning_is_computed_once_and_every_row_is_its_own_path(
    rows: list[list[int]],
) -> None:
    (micro,) = plan_packed(
        order_rows(arrays(rows), key_cost=0.0), [len(row) for row in rows], NO_LIMIT
    )
    segments = laid_out(micro, rows)
    tokens = packed_tokens(segments, micro, rows)
    assert len(tokens) == sum(n for _, _, n in segments.parts) == len(prefixes(rows))
    assert count_unique(arrays(rows)) == len(prefixes(rows))
    for (row, _), places in zip(micro, segments.places, strict=True):
        assert [tokens[place] for place in places] == rows[row]
    end = 0
    for (row, start, n), keys in zip(segments.parts, segments.keys, strict=True):
        # The last keys are the segment's own, and before them stands what the row says.
        assert keys[-n:].tolist() == list(range(end, end + n))
        assert [tokens[key] for key in keys] == rows[micro[row][0]][: start + n]
        end += n


@pytest.mark.seconds
@given(
    ROWS, st.integers(1, 20), st.integers(1, 5), st.booleans(), st.sampled_from([None, 0.0, 0.4])
)
@settings(max_examples=300, deadline=None)
def test_a_plan_holds_every_row_once_within_its_limits(
    rows: list[list[int]], budget: int, size: int, by_tokens: bool, cost: float | None
) -> None:
    limits = (
        MicroBatching(max_token_len=budget) if by_tokens else MicroBatching(micro_batch_size=size)
    )
    lengths = [len(row) for row in rows]
    plan = plan_packed(order_rows(arrays(rows), cost), lengths, limits)
    assert sorted(row for micro in plan for row, _ in micro) == list(range(len(rows)))
    sizes = []
    for micro in plan:
        segments = laid_out(micro, rows)
        tokens = packed_tokens(segments, micro, rows)
        sizes.append(len(tokens))
        assert len(tokens) == sum(lengths[row] - shared for row, shared in micro)
        for (row, _), places in zip(micro, segments.places, strict=True):
            assert [tokens[place] for place in places] == rows[row]
        assert len(micro) <= size or by_tokens
        assert len(tokens) <= budget or len(micro) == 1 or not by_tokens
        assert cost is not None or not any(shared for _, shared in micro)
    assert sizes == sorted(sizes, reverse=True)


def test_the_documented_example() -> None:
    rows = ["abg", "abcf", "abcde"]
    order = order_rows(arrays([[ord(c) for c in row] for row in rows]), 0.0)
    assert order == [(2, 0), (1, 3), (0, 2)]
    segments = laid_out(order, rows)
    texts = [rows[order[r][0]][s : s + n] for r, s, n in segments.parts]
    assert texts == ["ab", "c", "de", "f", "g"]
    assert [keys.tolist() for keys in segments.keys] == [
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 5],
        [0, 1, 6],
    ]


def test_rows_that_share_too_little_for_their_copies_are_computed_by_themselves() -> None:
    rows = arrays([[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9, 9]])
    assert [shared for _, shared in order_rows(rows, 0.49)] == [0, 3]
    assert [shared for _, shared in order_rows(rows, 0.5)] == [0, 0]


def test_micro_batches_of_rows_that_share_nothing_are_filled_whatever_their_order() -> None:
    rows = [[n] * length for n, length in enumerate([9, 9, 7, 7])]
    plan = plan_packed(order_rows(arrays(rows), 0.0), [9, 9, 7, 7], MicroBatching(max_token_len=16))
    assert [sum(len(rows[row]) for row, _ in micro) for micro in plan] == [16, 16]


def test_a_large_group_is_cut_evenly() -> None:
    """4 + 6 x 5 tokens, of at most 20: two parts of 4 + 3 x 5."""
    rows = [[0, 0, 0, 0, *[n] * 5] for n in range(1, 7)]
    plan = plan_packed(order_rows(arrays(rows), 0.0), [9] * 6, MicroBatching(max_token_len=20))
    assert [len(micro) for micro in plan] == [3, 3]


def test_the_cost_of_a_copied_key_by_hand() -> None:
    """Two of four heads of 16 hold keys: (24 x 32 x 120 + 64 x 12 x 64) / (72 x 64 x 64)."""
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    assert key_cost(config) == pytest.approx((92_160 + 49_152) / 294_912)
    qwen = LlamaConfig(hidden_size=1536, num_attention_heads=12, num_key_value_heads=2)
    assert key_cost(qwen) < 0.02, "with real models sharing nearly always pays"


def test_keys_that_many_short_answers_copy_count_towards_the_budget() -> None:
    """A prompt of 300 tokens and 200 answers of one: 499 tokens, but 60,200 keys."""
    rows = [np.array([*range(300), 1000 + i]) for i in range(200)]
    plan = plan_packed(order_rows(rows, 0.01), [301] * 200, MicroBatching(max_token_len=600))
    assert sorted(row for part in plan for row, _ in part) == [*range(200)]
    keys = [301 * len(part) for part in plan]
    assert max(keys) <= KEYS_PER_TOKEN * 600
    assert len(plan) == 7, "60,200 / 9,600 rounded up"


@st.composite
def trees_of_eight_leaves(draw: st.DrawFn) -> list[np.ndarray]:
    """Draws paths, each of which leaves an earlier one anywhere and goes on by itself."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    rows = [rng.integers(1, 1000, size=int(rng.integers(200, 1500)))]
    for _ in range(7):
        before = rows[int(rng.integers(len(rows)))]
        kept = before[: int(rng.integers(1, len(before) + 1))]
        own = rng.integers(1, 1000, size=int(rng.integers(20, 500)))
        rows.append(np.concatenate([kept, own]))
    return rows


@pytest.mark.seconds
@given(trees_of_eight_leaves())
@settings(max_examples=50, deadline=None)
def test_a_tree_of_eight_leaves_computes_hardly_more_than_its_unique_tokens(
    rows: list[np.ndarray],
) -> None:
    """With the sizes of Qwen2.5-0.5B, in a micro-batch of 16,384 tokens."""
    config = LlamaConfig(
        hidden_size=896, num_attention_heads=14, num_key_value_heads=2, head_dim=64
    )
    limits = MicroBatching(max_token_len=16_384)
    lengths = [len(row) for row in rows]
    plan = plan_packed(order_rows(rows, key_cost(config)), lengths, limits)
    computed = sum(lengths[row] - shared for micro in plan for row, shared in micro)
    unique = count_unique(rows)
    assert unique <= computed <= 1.1 * unique


def test_no_rows_have_no_tokens() -> None:
    assert count_unique([]) == 0


def test_a_row_that_begins_with_all_of_another_goes_on_with_its_segment() -> None:
    """Turns that a history grows by are one segment, whose keys nothing copies."""
    rows = ["abc", "abcde", "abcdef", "abcx"]
    order = order_rows(arrays([[ord(c) for c in row] for row in rows]), 0.0)
    segments = laid_out(order, rows)
    texts = [rows[order[r][0]][s : s + n] for r, s, n in segments.parts]
    assert texts == ["abcdef", "x"]
    assert [keys.tolist() for keys in segments.keys] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 6]]
    assert [places.tolist() for places in segments.places] == [
        [0, 1, 2],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 6],
    ]
