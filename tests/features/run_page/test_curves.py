"""Curves: what is thinned out and what stays, and the mean of several runs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from features.run_page.curves import CurveWriter, curve_of, mean_of_runs, points_for, thin
from features.run_page.metric_store import MetricStore
from tests.features.run_page.made_runs import content_of, curve_in, make_run, steps


def test_every_step_of_a_short_run_stands_on_the_page_with_its_own_value(tmp_path: Path) -> None:
    content = content_of(make_run(tmp_path, steps(40)))
    curve = curve_in(content, "critic/score/mean")
    assert curve["first"] == list(range(1, 41))
    assert np.allclose(curve["mean"], np.arange(1, 41) / 10)
    assert "low" not in curve


def test_a_spike_of_one_step_in_five_thousand_stays_to_be_seen() -> None:
    values = np.ones(5000)
    values[3333] = 100.0
    values[17] = -7.0
    curve = thin(curve_of(np.arange(5000), values), most=600)
    assert len(curve.mean) == 600
    assert curve.high is not None and curve.high.max() == 100.0
    assert curve.low is not None and curve.low.min() == -7.0
    # Every step is in one part, and the parts' means are those of their steps.
    assert curve.first[0] == 0 and curve.last[-1] == 4999
    assert (curve.first[1:] == curve.last[:-1] + 1).all()
    sizes = curve.last - curve.first + 1
    assert math.isclose((curve.mean * sizes).sum(), values.sum())


def test_numbers_that_are_not_finite_are_gaps_and_are_counted() -> None:
    values = np.array([1.0, np.nan, np.inf, -np.inf, 2.0])
    curve = curve_of(np.arange(5), values)
    assert np.isnan(curve.mean).tolist() == [False, True, True, True, False]
    written = CurveWriter().write(curve)
    assert written["notFinite"] == 3


def test_a_part_of_a_long_curve_without_a_finite_value_is_a_gap() -> None:
    values = np.ones(1000)
    values[500:520] = np.nan
    curve = thin(curve_of(np.arange(1000), values), most=100)
    assert np.isnan(curve.mean).sum() == 2
    assert (curve.mean[np.isfinite(curve.mean)] == 1).all()


def test_the_mean_of_runs_is_of_those_that_have_the_step() -> None:
    first = (np.array([1, 2, 3]), np.array([1.0, 2.0, 3.0]))
    second = (np.array([2, 3, 4]), np.array([4.0, np.nan, 8.0]))
    curve = mean_of_runs([first, second])
    assert curve.first.tolist() == [1, 2, 3, 4]
    assert curve.mean.tolist() == [1.0, 3.0, 3.0, 8.0]
    assert curve.low is not None and curve.low.tolist() == [1.0, 2.0, 3.0, 8.0]
    assert curve.high is not None and curve.high.tolist() == [1.0, 4.0, 3.0, 8.0]
    assert curve.runs is not None and curve.runs.tolist() == [1, 2, 1, 1]


def test_curves_with_the_same_steps_share_them() -> None:
    writer = CurveWriter()
    one = writer.write(curve_of(np.arange(3), np.ones(3)))
    other = writer.write(curve_of(np.arange(3), np.zeros(3)))
    writer.write(curve_of(np.arange(2), np.zeros(2)))
    assert one["table"] == other["table"] and len(writer.tables) == 2


def test_a_number_too_large_for_the_page_is_a_gap_and_not_an_error() -> None:
    written = CurveWriter().write(curve_of(np.arange(2), np.array([1e300, 1.0])))
    assert written["mean"]


def test_the_later_value_of_a_step_counts_and_damaged_lines_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        '{"step": 2, "a": 5}\n{"step": 1, "a": "nan"}\nnonsense\n[1]\n{"a": 1}\n'
        '{"step": 2, "a": 7}\n{"step": 3, "a"'
    )
    store = MetricStore.read(file)
    found, values = store.column("a")
    assert found.tolist() == [1, 2]
    assert np.array_equal(values, [np.nan, 7], equal_nan=True)
    assert store.latest("a") == 7 and store.latest("b") is None
    assert store.values_at("a", [2, 1, 9]) == [7.0, None, None]


def test_very_many_curves_have_fewer_points_each() -> None:
    assert points_for(1) == points_for(300) == 600
    assert points_for(5000) == 100 and points_for(10**6) == 60
