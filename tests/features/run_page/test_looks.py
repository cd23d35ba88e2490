"""Ways from a run's page into its episodes: what there is to see, and filters that fit a chart."""

from __future__ import annotations

from pathlib import Path

import pytest

from features.run_page.charts import MOST_LINES, charts_of
from features.run_page.looks import looks_of
from features.run_page.metric_store import MetricStore
from tests.features.run_page.made_runs import content_of, make_run, steps
from training.run.metric_names import Metric


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


def test_a_table_of_metrics_may_name_a_chart_and_a_number_at_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    title = "Seconds of GPUs"
    table = {
        "gpu/step": Metric("gpu/step", "seconds", "Of a step.", chart=title),
        "gpu/task": Metric("gpu/task", "seconds", "Of a task.", chart=title, tile="GPU seconds"),
    }
    monkeypatch.setattr("features.run_page.content._known_metric", table.get)
    records = steps(4, **{"gpu/step": 8.0, "gpu/task": 2.0, "mine": 1.0})
    content = content_of(make_run(tmp_path / "run", records))
    chart = content["charts"][-1]
    assert (chart["title"], chart["unit"], chart["kind"]) == (title, "seconds", "lines")
    assert [line["metric"] for line in chart["lines"]] == ["gpu/step", "gpu/task"]
    assert [chart["key"] for chart in content["charts"]] == ["reward", f"table/{title}"]
    tiles = {row["label"]: row["last"] for row in content["runs"][0]["summary"]}
    assert tiles == {"reward of an episode": 0.35, "GPU seconds": 2.0}


def test_a_chart_that_tables_name_has_no_more_lines_than_others() -> None:
    names = [f"gpu/{number}" for number in range(MOST_LINES + 3)]
    [chart] = charts_of(names, lambda name: Metric(name, "1", "A share.", chart="Shares"))
    assert (len(chart.lines), chart.left_out) == (MOST_LINES, 3)


def test_a_run_without_a_finite_number_has_a_page(tmp_path: Path) -> None:
    records = [{"step": 1, "agent/retries": "nan", "response/empty_ratio": "inf"}]
    run = content_of(make_run(tmp_path / "run", records))["runs"][0]
    assert [row["words"] for row in run["looks"]][3:] == []
