"""Estimates over tasks: by brute force, by hand, and how often intervals hold the true value."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import combinations

import numpy as np
import pytest

from training.run.metrics import evaluation_statistics as statistics


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("passed", [0, 1, 2, 4, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(passed: int, k: int) -> None:
    samples = [True] * passed + [False] * (5 - passed)
    subsets = list(combinations(samples, k))
    expected = sum(map(any, subsets)) / len(subsets)
    assert statistics.pass_at_k(np.array([samples]), k) == pytest.approx([expected])


def test_pass_at_k_has_no_bias() -> None:
    """Over many draws of 6 samples its mean is the true chance that one of 3 passes."""
    passed = np.random.default_rng(0).random((200_000, 6)) < 0.2
    assert statistics.pass_at_k(passed, 3).mean() == pytest.approx(1 - 0.8**3, abs=3e-3)


def majority_by_hand(votes: list[str], values: list[float], k: int) -> float:
    results = []
    for subset in combinations(range(len(votes)), k):
        counts = Counter(votes[i] for i in subset)
        most = max(counts.values())
        winners = [vote for vote, count in counts.items() if count == most]
        paid = [np.mean([values[i] for i in range(len(votes)) if votes[i] == w]) for w in winners]
        results.append(np.mean(paid))
    return float(np.mean(results))


@pytest.mark.parametrize("k", [1, 2, 3, 4, 6])
def test_majority_at_k_is_the_mean_over_all_subsets(k: int) -> None:
    votes = ["4", "5", "4", "None", "5", "4"]
    values = [1.0, 0.0, 1.0, -1.0, 0.0, 1.0]
    result = statistics.majority_at_k([votes], np.array([values]), k)
    assert result == pytest.approx([majority_by_hand(votes, values, k)])


def test_a_tie_of_votes_counts_by_halves_in_whatever_order_they_come() -> None:
    votes = [["right", "wrong"], ["wrong", "right"]]
    result = statistics.majority_at_k(votes, np.array([[1.0, 0.0], [0.0, 1.0]]), 2)
    assert result.tolist() == [0.5, 0.5]


def test_majority_of_many_samples_is_drawn_and_near_the_mean_over_all_subsets() -> None:
    votes = ["a"] * 7 + ["b"] * 5 + ["c"] * 3
    values = np.array([[1.0] * 7 + [0.0] * 8])
    drawn = statistics.majority_at_k([votes], values, 5)
    assert drawn == pytest.approx([majority_by_hand(votes, values[0].tolist(), 5)], abs=0.03)
    assert statistics.majority_at_k([votes], values, 5) == drawn


@pytest.mark.seconds
@pytest.mark.parametrize("tasks", [8, 40])
def test_an_interval_holds_the_true_mean_in_about_95_of_100_cases(tasks: int) -> None:
    """Tasks differ in how hard they are; each is tried four times."""
    generator = np.random.default_rng(1)
    held = 0
    cases = 400
    for case in range(cases):
        chances = generator.beta(2, 3, size=tasks)
        rewards = generator.random((tasks, 4)) < chances[:, None]
        low, high = statistics.bootstrap_interval(rewards.mean(axis=1), seed=case) or (1, 0)
        held += low <= 2 / 5 <= high
    assert 0.92 <= held / cases <= 0.98


@pytest.mark.seconds
def test_an_interval_that_takes_samples_for_tasks_holds_the_true_mean_too_rarely() -> None:
    """Why a task's samples are kept together: as tasks of their own they would promise too much."""
    generator = np.random.default_rng(1)
    held = 0
    for case in range(200):
        rewards = np.repeat(generator.random((10, 1)) < 0.4, 8, axis=1).astype(float)
        low, high = statistics.bootstrap_interval(rewards.flatten(), seed=case) or (1, 0)
        held += low <= 0.4 <= high
    assert held / 200 < 0.7


def test_students_quantile_is_that_of_the_tables() -> None:
    quantiles = [statistics.student_quantile(degrees) for degrees in (4, 10, 30, 1000)]
    assert quantiles == pytest.approx([2.776, 2.228, 2.042, 1.962], abs=0.01)


def test_one_task_has_no_interval_and_equal_tasks_have_none_without_width() -> None:
    assert statistics.estimate(np.array([0.5])).low is None
    # Without a range nothing says how far another task may be off.
    outside = statistics.estimate(np.full(12, 7.0))
    assert (outside.value, outside.low, outside.high, outside.approximate) == (
        7.0,
        None,
        None,
        True,
    )
    # No width is proved where the values have a range and could have been others.
    alike = statistics.estimate(np.full(12, 0.5))
    assert alike.low is not None and alike.high is not None
    assert alike.low < 0.3 and alike.high > 0.7 and not alike.approximate


@pytest.mark.parametrize(
    ("rewards", "bounds"),
    [
        ([1.0, 1.0], (0.0, 1.0)),
        ([0.0, 0.0], (0.0, 1.0)),
        ([0.5, 0.25], (0.0, 1.0)),
        ([1.0 + 1e-7, -1e-7], (0.0, 1.0)),
        ([[1.0, -1.0], [1.0, 1.0]], (-1.0, 1.0)),
        ([-1.0, -1.0], (-1.0, 1.0)),
        ([-1.0, 0.0, 1.0], (-1.0, 1.0)),
        ([-0.5, 1.0], (-1.0, 1.0)),
        ([2.0, 0.0], statistics.UNKNOWN),
        ([-2.0, 1.0], statistics.UNKNOWN),
        ([1.0, float("nan")], statistics.UNKNOWN),
        ([float("inf"), 1.0], statistics.UNKNOWN),
        ([], statistics.UNKNOWN),
    ],
)
def test_a_range_below_0_is_taken_only_where_a_value_below_0_was_seen(rewards, bounds) -> None:
    assert statistics.reward_bounds(np.array(rewards)) == bounds


def test_what_rounding_makes_of_equal_values_has_an_interval_of_equal_values() -> None:
    noise = 0.1 + 1e-10 * np.arange(400)
    found = statistics.estimate(noise)
    assert found.low is not None and found.high is not None
    assert found.high - found.low > 0.05
    assert statistics.estimate(7 + noise).low is None


def test_equal_differences_leave_a_doubt_as_large_as_the_range() -> None:
    """Of ten tasks that are alike, up to 0.308 of all may be otherwise: 0.692^10 is 0.025."""
    same = statistics.paired_difference(np.ones(10), np.ones(10))
    assert (same.low, same.high) == pytest.approx((-0.3085, 0.3085), abs=1e-4)
    better = statistics.paired_difference(np.ones(10), np.zeros(10))
    assert (better.low, better.high) == pytest.approx((1 - 2 * 0.3085, 1.0), abs=1e-4)
    of_one_and_minus_one = statistics.paired_difference(np.ones(10), -np.ones(10))
    assert of_one_and_minus_one.low == pytest.approx(2 * (1 - 2 * 0.3085), abs=1e-4)
    assert statistics.paired_difference(np.full(10, 7.0), np.full(10, 5.0)).low is None


def test_an_interval_of_whole_tasks_is_that_of_the_tables_of_clopper_and_pearson() -> None:
    assert statistics.trials_interval(0.9, 10) == pytest.approx((0.55498, 0.99747), abs=1e-5)
    assert statistics.trials_interval(0.5, 20) == pytest.approx((0.27196, 0.72804), abs=1e-5)
    assert statistics.beta_share(2, 1, 0.3) == pytest.approx(0.09)


def test_rewards_of_one_and_minus_one_have_the_interval_of_their_shares() -> None:
    shares = np.array([1.0, 1.0, 0.75, 1.0, 0.5])
    of_shares = statistics.estimate(shares)
    turned = statistics.estimate(2 * shares - 1, bounds=(-1.0, 1.0))
    assert of_shares.low is not None and turned.low is not None
    assert turned.low == pytest.approx(2 * of_shares.low - 1)


# Distributions of how often a task is solved, as beta's two numbers.
TASKS = {"easy": (8, 0.4), "hard": (0.4, 8), "u": (0.3, 0.3), "mixed": (2, 3), "alike": (20, 20)}

EXACT = cache(statistics.trials_interval)


def share_of_intervals_that_hold(
    kind: str, tasks: int, samples: int, cases: int, monkeypatch: pytest.MonkeyPatch
) -> float:
    monkeypatch.setattr(statistics, "DRAWS", 1000)
    # Few shares come again and again, each of which takes 10 ms.
    monkeypatch.setattr(statistics, "trials_interval", EXACT)
    a, b = TASKS[kind]
    generator = np.random.default_rng(7)
    held = 0
    for case in range(cases):
        chances = generator.beta(a, b, size=tasks)
        rewards = generator.random((tasks, samples)) < chances[:, None]
        found = statistics.estimate(rewards.mean(axis=1), seed=case)
        assert found.low is not None and found.high is not None
        held += found.low <= a / (a + b) <= found.high
    return held / cases


@pytest.mark.parametrize("kind", ["easy", "hard", "u"])
@pytest.mark.parametrize(("tasks", "samples"), [(5, 1), (10, 1), (20, 4)])
def test_an_interval_of_few_hard_or_easy_tasks_holds_the_true_mean(
    kind, tasks, samples, monkeypatch
) -> None:
    assert share_of_intervals_that_hold(kind, tasks, samples, 150, monkeypatch) >= 0.93


@pytest.mark.slow
@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("tasks", [5, 10, 20, 50, 100])
@pytest.mark.parametrize("samples", [1, 4, 16])
def test_an_interval_holds_the_true_mean_for_all_kinds_of_tasks(
    kind, tasks, samples, monkeypatch
) -> None:
    # 2,000 cases show a share of 0.95 as one of 0.935 or more.
    assert share_of_intervals_that_hold(kind, tasks, samples, 2000, monkeypatch) >= 0.93


def test_tasks_that_all_pass_or_all_fail_still_leave_a_doubt() -> None:
    """The end of the interval is the share by which such a result comes in 1 of 40 cases."""
    passed = statistics.estimate_share(np.ones(10))
    assert passed.low is not None
    assert passed.low**10 == pytest.approx(0.025)
    failed = statistics.estimate_share(np.zeros(10))
    assert (failed.low, failed.high) == pytest.approx((0.0, 1 - passed.low))
    assert statistics.estimate_share(np.ones(1)).low is None
    mixed = np.array([0.0, 1.0, 1.0])
    assert statistics.estimate_share(mixed) == statistics.estimate(mixed)


def test_a_paired_interval_is_narrower_than_the_models_own() -> None:
    """Both find the same tasks hard; the first is a little better on each."""
    generator = np.random.default_rng(3)
    hard = generator.random(60)
    first = hard + 0.05 + 0.02 * generator.standard_normal(60)
    difference = statistics.paired_difference(first, hard)
    alone = statistics.estimate(hard)
    assert statistics.is_shown(difference)
    assert difference.high is not None and difference.low is not None
    assert alone.high is not None and alone.low is not None
    assert difference.high - difference.low < (alone.high - alone.low) / 5


@pytest.mark.seconds
def test_a_difference_is_shown_in_one_of_twenty_cases_where_there_is_none() -> None:
    generator = np.random.default_rng(4)
    shown = 0
    for case in range(400):
        first, second = generator.random((2, 20, 4)) < generator.random((20, 1))
        difference = statistics.paired_difference(first.mean(1), second.mean(1), seed=case)
        shown += statistics.is_shown(difference)
    assert shown / 400 < 0.09


def test_a_few_tasks_show_no_difference_however_clear_it_looks() -> None:
    assert not statistics.is_shown(statistics.paired_difference(np.ones(5), np.zeros(5)))
    assert statistics.is_shown(statistics.paired_difference(np.ones(6), np.zeros(6)))
    assert not statistics.is_shown(statistics.paired_difference(np.ones(1), np.zeros(1)))


def test_what_float32_makes_of_one_passes_at_one_and_nan_does_not() -> None:
    values = np.array([np.nextafter(np.float32(1), np.float32(0)), 0.99, np.nan, 2.0])
    assert statistics.passes(values, 1.0).tolist() == [True, False, False, True]


def test_subset_sizes_double_up_to_n() -> None:
    sizes = [statistics.subset_sizes(n) for n in (1, 2, 3, 8, 12)]
    assert sizes == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]
