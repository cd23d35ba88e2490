"""What metrics mean: the tables have what the code logs, and the page is the tables'."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from training.features import absent_features
from training.run.metric_names import all_metrics, find_metric, main, read_table, write_page

# A metric in the code: a text with a slash behind one of these words.
FAMILIES = "actor|critic|agent|env|tool|tool_failures|training|rollout_corr|async|canary|alarms"
FAMILIES += "|filter_groups|perf|timing_s|timing_per_token_ms|response_length|prompt_length|groups"
LITERAL = re.compile(rf'f?"((?:{FAMILIES}|response|\{{prefix\}}|\{{model\}})/[^"= ]+)"')
# What looks so and is none: names whose ending the code fills in (tests/e2e/conftest.py sees
# those), folders, parts that are joined before anyone sees them, what only an alarm reads.
NO_METRICS = re.compile(
    r"[a-z_]+/x(/max|/mean)?$|perf/driver_memory_gib|critic/(advantages|returns|rewards|score|values)$|.*/$|.*\.(py|yaml|csv)$"
    r"|training/run/alarms|training/rollout_ratio_(bin|square)"
)

needs_all_features = pytest.mark.skipif(
    bool(absent_features()), reason="a feature's folder is gone, and its sentences with it"
)


def metrics_in_the_code() -> set[str]:
    """Lists the metrics that the code names, with `x` for what it puts into a name."""
    found = set()
    for folder in ("training", "workers", "features"):
        for file in (PROJECT / folder).rglob("*.py"):
            if file.name == "rank_layout.py":
                continue  # verl's log_seqlen_unbalance, which no run of this project logs
            for name in LITERAL.findall(file.read_text()):
                name = re.sub(r"^\{(prefix|model)\}", "actor", name)
                found.add(re.sub(r"\{[^}]*\}", "x", name))
    return {name for name in found if not NO_METRICS.match(name)}


@needs_all_features
def test_every_metric_that_the_code_names_has_a_sentence() -> None:
    names = metrics_in_the_code()
    assert len(names) > 80
    assert [name for name in sorted(names) if find_metric(name) is None] == []
    assert find_metric("actor/nothing_such") is None


@needs_all_features
def test_the_page_is_the_table() -> None:
    assert (PROJECT / "docs/metrics.md").read_text() == write_page(), (
        "python -m training.run.metric_names --page writes the page"
    )


def test_a_sentence_is_one_and_no_name_is_hidden_by_another() -> None:
    for metric in all_metrics():
        assert metric.meaning.endswith(".") and metric.unit, metric.name
        assert find_metric(metric.name) == metric


def test_a_run_and_a_name_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"step": 1, "actor/ppo_kl": 0.25, "mine": 2.0, "agent/ending/done": "nan"}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("actor/ppo_kl = 0.25 (nats/token): How far")
    assert said[1].startswith("agent/ending/done = nan (episodes): ")
    assert said[2] == "mine = 2.0: a metric of this run's own code"
    assert main(["timing_s/gen"]) == 0 and "seconds" in capsys.readouterr().out
    assert main(["timing_s/nothing"]) == 1 and "docs/metrics.md" in capsys.readouterr().err
    assert main([]) == 2


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of the one feature that is there, to be written."""
    file = tmp_path / "metric_names.yaml"
    monkeypatch.setattr("training.run.metric_names.files", lambda attribute: [file])
    read_table.cache_clear()
    yield file
    read_table.cache_clear()


def test_a_feature_brings_sentences_under_headings_of_the_core_and_its_own(table: Path) -> None:
    table.write_text(
        '"Time and memory":\n'
        "  gpu/hours: {unit: hours, meaning: Hours of all GPUs., chart: Hours, tile: hours}\n"
        '"Of its own":\n'
        "  gpu/NAME/share: {unit: '1', meaning: Share of one.}\n"
    )
    hours = find_metric("gpu/hours")
    assert hours is not None and (hours.chart, hours.tile) == ("Hours", "hours")
    assert read_table()["Time and memory"][0].name == "timing_s/step"
    assert read_table()["Time and memory"][-1] == hours
    share = find_metric("gpu/0/share")
    assert share is not None and (share.chart, share.tile) == ("", "")
    page = write_page()
    assert "| `gpu/hours` | hours | Hours of all GPUs. |" in page
    assert (
        page.index("## Time and memory") < page.index("`gpu/hours`") < page.index("## Of its own")
    )
    # Those of features that are not there.
    assert find_metric("alarms/count") is None


@pytest.mark.parametrize(
    "text",
    ["", "a: b", "A heading:\n  a/b: {unit: s}", "A heading:\n  a/b: {units: s}", "a: [", "- a"],
)
def test_a_table_that_is_none_is_named_with_what_to_write(text: str, table: Path) -> None:
    table.write_text(text)
    with pytest.raises(ValueError, match=r"metric_names\.yaml is no table of metrics: write a he"):
        find_metric("a/b")
