"""Features add entries to the records of episodes; one that fails costs its own alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from features.records.added_entries import AddedEntries, open_added_entries
from training.config import PPOConfig
from workers.model.probe import FAULTS
from workers.rollout.episode import Episode

EPISODE = Episode(group=0, sample=3)


def test_entries_of_several_features_stand_in_one_record() -> None:
    added = AddedEntries(
        {
            "one": lambda episode: {"sample_is": episode.sample},
            "other": lambda episode: {"group_is": episode.group},
        }
    )
    assert added.of(EPISODE, {"turns": []}) == {"sample_is": 3, "group_is": 0}


@pytest.mark.parametrize("returned", [{"turns": []}, {"twice": 1}, None])
def test_a_feature_that_fails_costs_its_own_entries(
    returned: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(FAULTS, raising=False)
    added = AddedEntries({"first": lambda _: {"twice": 0}, "bad": lambda _: returned})
    with caplog.at_level(logging.WARNING):
        assert added.of(EPISODE, {"turns": []}) == {"twice": 0}
        assert added.of(EPISODE, {"turns": []}) == {"twice": 0}
    [warning] = caplog.messages
    assert "features/bad adds nothing to the records" in warning


def test_what_a_config_turns_off_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "features.records.added_entries"
    monkeypatch.setattr(f"{module}.named", lambda _: [("on", "m:on"), ("off", "m:off")])

    def entries(_: Episode) -> Mapping[str, Any]:
        return {"here": True}

    opened = {"m:on": lambda _: entries, "m:off": lambda _: None}
    monkeypatch.setattr(f"{module}.load_object", lambda place, _: opened[place])
    assert open_added_entries(PPOConfig()).adding == {"on": entries}
