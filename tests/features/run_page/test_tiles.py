"""The first tiles of a run's page: validation, its best step, time to go; constants come last."""

from __future__ import annotations

from pathlib import Path

from features.run_page.metric_store import MetricStore
from features.run_page.tiles import tiles_of
from tests.features.run_page.made_runs import content_of, make_run, steps

VALIDATION = "val-core/game/reward/mean@1"


def store(tmp_path: Path, records: list[dict[str, float]]) -> MetricStore:
    return MetricStore.read(make_run(tmp_path, records) / "metrics.jsonl")


def test_the_last_validation_stands_first_and_its_best_behind_it(tmp_path: Path) -> None:
    records = steps(6)
    for step, reward in ((2, 0.25), (4, 0.75), (6, 0.5)):
        records[step - 1][VALIDATION] = reward
    tiles = tiles_of(store(tmp_path, records), 10, goes_on=False)
    assert [(tile["label"], tile["value"], tile["note"]) for tile in tiles] == [
        ("validation, game/reward/mean@1", 0.5, "at step 6"),
        ("its best", 0.75, "at step 4"),
    ]


def test_without_validations_the_best_step_is_the_rewards(tmp_path: Path) -> None:
    records = steps(3)
    records[1]["critic/score/mean"] = 0.9
    (tile,) = tiles_of(store(tmp_path, records), 10, goes_on=False)
    assert (tile["label"], tile["value"], tile["note"]) == (
        "reward at its best step",
        0.9,
        "step 2",
    )


def test_a_run_that_goes_on_says_how_long(tmp_path: Path) -> None:
    metrics = store(tmp_path, steps(4, **{"timing_s/step": 30.0}))
    assert tiles_of(metrics, 10, goes_on=True)[-1] == {
        "label": "to go",
        "note": "6 steps of 30 s",
        "value": None,
        "seconds": 180.0,
    }
    assert all(tile["label"] != "to go" for tile in tiles_of(metrics, 10, goes_on=False))
    assert all(tile["label"] != "to go" for tile in tiles_of(metrics, 4, goes_on=True))
    assert all(tile["label"] != "to go" for tile in tiles_of(metrics, None, goes_on=True))


def test_numbers_that_are_not_finite_make_no_tile(tmp_path: Path) -> None:
    records = [{"step": 1, VALIDATION: float("nan")}, {"step": 2, "critic/score/mean": 0.5}]
    assert tiles_of(store(tmp_path, records), 10, goes_on=True) == []


def test_what_never_changed_is_the_last_tile(tmp_path: Path) -> None:
    records = [
        {"step": n, "critic/score/mean": 1.0, "actor/entropy": 1 / n, "timing_s/step": 2.0 + n}
        for n in range(1, 5)
    ]
    summary = content_of(make_run(tmp_path, records))["runs"][0]["summary"]
    names = [row["metric"] for row in summary]
    assert names == ["actor/entropy", "timing_s/step", "critic/score/mean"]
