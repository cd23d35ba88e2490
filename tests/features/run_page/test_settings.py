"""Settings on a page: what differs from the defaults, between steps and between runs."""

from __future__ import annotations

from pathlib import Path

from features.run_page.settings import (
    as_text,
    changed_settings,
    differences_from_defaults,
    is_of_one_run,
    read_settings,
)
from tests.features.run_page.made_runs import config_text, content_of, make_run, steps
from training.run.recorded_config import flat_settings

LR = "actor_rollout_ref.actor.optim.lr"


def test_only_settings_that_are_not_the_defaults_are_listed(tmp_path: Path) -> None:
    content = content_of(make_run(tmp_path, steps(1), settings=[f"{LR}=0.5"]))
    rows = {row["key"]: row for row in content["runs"][0]["settings"]}
    assert rows[LR]["value"] == "0.5" and rows[LR]["default"] == "1e-06"
    assert rows[LR]["doc"]
    assert "algorithm.gamma" not in rows


def test_the_defaults_differ_in_nothing_from_themselves() -> None:
    from training.config import PPOConfig
    from training.config.reference import to_yaml

    assert differences_from_defaults(flat_settings(to_yaml(PPOConfig()))) == []


def test_a_setting_that_no_longer_exists_is_told_so() -> None:
    [row] = differences_from_defaults({"trainer.gone": 3})
    assert (row.value, row.default) == ("3", "no such setting now")


def test_changes_are_read_from_recorded_configurations_in_their_order(tmp_path: Path) -> None:
    make_run(tmp_path, steps(9), settings=[f"{LR}=3.0"])
    first = config_text(f"{LR}=1.0", "trainer.resume_mode=disable")
    (tmp_path / "config.1.yaml").write_text(f"# steps 1 to 4\n{first}")
    (tmp_path / "config.2.yaml").write_text(f"# steps 5 to 7\n{config_text(f'{LR}=2.0')}")
    # How a run is resumed is no change of how it trains.
    changes = content_of(tmp_path)["runs"][0]["changes"]
    assert changes == [
        {"step": 4, "changed": [{"key": LR, "before": "1.0", "after": "2.0"}]},
        {"step": 7, "changed": [{"key": LR, "before": "2.0", "after": "3.0"}]},
    ]


def test_changes_come_from_events_where_no_configuration_is_left(tmp_path: Path) -> None:
    events = [
        {"time": 1.0, "step": 4, "kind": "settings", "changed": {LR: [1, 2], "odd": "x"}},
        {"time": 1.0, "step": 5, "kind": "settings", "changed": None},
    ]
    changes = content_of(make_run(tmp_path, steps(9), events))["runs"][0]["changes"]
    assert changes == [{"step": 4, "changed": [{"key": LR, "before": "1", "after": "2"}]}]


def test_damaged_or_missing_settings_are_none(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: [1")
    assert read_settings(tmp_path / "config.yaml") == {}
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe\x00")
    assert read_settings(tmp_path / "config.yaml") == {}
    assert read_settings(tmp_path / "none.yaml") == {}


def test_odd_settings_and_what_is_named_like_them_cost_no_page(tmp_path: Path) -> None:
    make_run(tmp_path, steps(2))
    (tmp_path / "config.yaml").write_text("1: 2\n3: {4: 5}\nagent: 7\n")
    (tmp_path / "config.1.yaml").mkdir()
    for name in ("config.².yaml", "config..yaml"):
        (tmp_path / name).write_text("# steps 1 to 1\n{}")
    (tmp_path / "config.2.yaml").write_text(f"# steps 1 to {10**30}\nhello")
    run = content_of(tmp_path)["runs"][0]
    assert run["changes"] == [] and run["settings"][0]["key"] == "1"


def test_a_missing_setting_is_not_the_same_as_null() -> None:
    assert changed_settings({"a": None}, {}) == {"a": ("null", "not set")}
    assert as_text("x" * 10_000).endswith("…") and len(as_text("x" * 10_000)) < 1000


def test_seeds_folders_and_names_belong_to_one_run() -> None:
    own = ["data.seed", "agent.env_kwargs.seed", "agent.start_seed", "trainer.experiment_name"]
    assert all(is_of_one_run(key) for key in own)
    assert not is_of_one_run("data.seeds_file") and not is_of_one_run(LR)
