"""Several runs on a page: seeds as one line with a band, and what makes groups differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from features.run_page.report import write_pages
from tests.features.run_page.made_runs import content_in, content_of, curve_in, make_run, steps

LR = "actor_rollout_ref.actor.optim.lr"


def make_seeds(folder: Path, name: str, *settings: str, seeds: int = 3) -> list[Path]:
    runs = []
    for seed in range(seeds):
        place = folder / f"{name}{seed}"
        own = [f"data.seed={seed}", f"trainer.default_local_dir={place}", *settings]
        records = [{"step": n, "critic/score/mean": n + seed} for n in (1, 2)]
        runs.append(make_run(place, records, settings=own))
    return runs


@pytest.mark.seconds
def test_runs_that_differ_in_their_seeds_are_one_line_with_a_band(tmp_path: Path) -> None:
    content = content_of(*make_seeds(tmp_path, "run"), page=tmp_path / "report.html")
    [group] = content["groups"]
    assert group["name"] == "run (3 seeds)" and len(group["runs"]) == 3
    curve = curve_in(content, "critic/score/mean")
    assert (curve["mean"], curve["low"], curve["high"]) == ([2.0, 3.0], [1.0, 2.0], [3.0, 4.0])
    assert content["differences"]["rows"] == []


@pytest.mark.seconds
def test_groups_are_named_by_what_makes_them_differ(tmp_path: Path) -> None:
    slow = make_seeds(tmp_path, "slow", f"{LR}=0.1", seeds=2)
    fast = make_seeds(tmp_path, "fast", f"{LR}=0.2", seeds=2)
    # The order of the command line is that of the lines, whatever runs lie between.
    content = content_of(slow[0], fast[0], slow[1], fast[1])
    assert [group["name"] for group in content["groups"]] == [
        "lr=0.1 (2 seeds)",
        "lr=0.2 (2 seeds)",
    ]
    assert content["differences"]["rows"] == [{"key": LR, "values": ["0.1", "0.2"]}]


def test_runs_without_recorded_settings_are_lines_of_their_own(tmp_path: Path) -> None:
    one = make_run(tmp_path / "a" / "run", steps(2))
    other = make_run(tmp_path / "b" / "run", steps(3))
    content = content_of(one, other)
    assert [group["name"] for group in content["groups"]] == ["a/run", "b/run"]
    assert [run["name"] for run in content["runs"]] == ["a/run", "b/run"]


def test_a_metric_of_one_seed_alone_is_drawn_from_that_one(tmp_path: Path) -> None:
    runs = make_seeds(tmp_path, "run", seeds=2)
    (runs[1] / "metrics.jsonl").write_text('{"step": 1, "own/number": 5}\n')
    curve = curve_in(content_of(*runs), "own/number")
    assert curve["mean"] == [5.0]


def test_a_run_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    [run] = make_seeds(tmp_path, "run", seeds=1)
    with pytest.raises(ValueError, match="is given twice"):
        write_pages([run, run / ".." / run.name])


def test_the_page_of_several_runs_lies_beside_the_first_or_where_it_is_asked(
    tmp_path: Path,
) -> None:
    runs = make_seeds(tmp_path, "run", seeds=2)
    assert write_pages(runs) == (tmp_path / "report.html", False)
    page, _ = write_pages(runs, tmp_path / "own.html")
    # Links go from where the page lies.
    content = content_in(page.read_text())
    assert content["runs"][1]["viewer"]["href"] == "run1/viewer/index.html"
    assert [len(group["runs"]) for group in content["groups"]] == [2]
