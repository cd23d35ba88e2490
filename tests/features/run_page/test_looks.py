"""Ways from a run's page into its episodes: what there is to see, and filters that fit a chart."""

from __future__ import annotations

from pathlib import Path

from features.run_page.charts import charts_of
from features.run_page.looks import looks_of
from features.run_page.metric_store import MetricStore
from tests.features.run_page.made_runs import content_of, make_run


def store_of(**columns: list[float]) -> MetricStore:
    store = MetricStore()
    length = max(map(len, columns.values()))
    for step in range(length):
        named = {name: values[step] for name, values in columns.items() if step < len(values)}
        store.add(step + 1, named)
    return store


def test_a_way_is_shown_with_how_much_there_is_and_left_out_where_there_is_nothing() -> None:
    store = store_of(
        **{
            "agent/retries": [0, 5, 2],
            "agent/failed": [0, 0, 0],
            "response/empty_ratio": [0.25, float("nan"), 0.5],
            "response/rows_per_episode": [1, 1, 1],
            "tool/a&b=c/failures": [1, 0, 0],
        }
    )
    looks = {row["words"]: (row["note"], row["view"]) for row in looks_of(store, 3)}
    assert looks == {
        "all of the last step": ("", "list?kind=train&step=3&sort=-reward"),
        "the best paid": ("", "list?kind=train&sort=-reward"),
        "the worst paid": ("", "list?kind=train&sort=reward"),
        "crashed and played again": (
            "7, most at step 2",
            "list?kind=train&refilled=1&sort=-attempts",
        ),
        "without a word, the best paid first": (
            "up to 0.5 of a step, at step 3",
            "list?kind=train&empty=1&sort=-reward",
        ),
        "calls of a&b=c that failed": (
            "1, most at step 1",
            "list?kind=train&tool=a%26b%3Dc&sort=reward",
        ),
    }


def test_a_line_of_a_chart_leads_to_the_episodes_behind_it() -> None:
    names = [
        "actor/pg_clipfrac",
        "agent/ending/env_crash",
        "agent/retries",
        "env/My Game#2/reward",
        "groups/no_spread",
        "tool/look_up/failures",
    ]
    views = {}
    for chart in charts_of(names, lambda name: None):
        for line in chart.as_json()["lines"]:
            views[line["metric"]] = line["view"]
    assert views == {
        "actor/pg_clipfrac": "kind=train&fate=clipped&sort=-ratio",
        "agent/ending/env_crash": "kind=train&ending=env_crash&sort=-reward",
        "agent/retries": "kind=train&refilled=1&sort=-attempts",
        "env/My Game#2/reward": "kind=train&source=My%20Game%232&sort=-reward",
        "groups/no_spread": "kind=train&spread=0&sort=-reward",
        "tool/look_up/failures": "kind=train&tool=look_up&sort=reward",
    }


def test_a_run_without_a_finite_number_has_a_page(tmp_path: Path) -> None:
    records = [{"step": 1, "agent/retries": "nan", "response/empty_ratio": "inf"}]
    run = content_of(make_run(tmp_path / "run", records))["runs"][0]
    assert [row["words"] for row in run["looks"]][3:] == []
