"""Where an alarm leads: to the episode and the token that rang it, its group, or a sorted list."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import numpy as np
import torch

from data.protocol import DataProto
from features.alarms.catalogue import ADVICE, view_of
from features.alarms.finding import Finding, Place
from features.alarms.rules.batch import unsampled_tokens
from features.alarms.rules.groups import uneven_groups
from tests.conftest import PROJECT
from tests.features.alarms.made_steps import changed, seen_step
from training.config import PPOConfig

# What the viewer's list takes.
FILTERS = {"step", "kind", "group", "ending", "tool", "fate", "text", "sort", "run"}
FILTERS |= {"refilled", "spread", "empty", "stale"}
SORTS = {"step", "reward", "tokens", "turns", "mismatch", "ratio", "entropy", "kl", "advantage"}
SORTS |= {"gradient", "seconds", "attempts"}


def test_every_alarm_has_a_view_that_the_viewer_knows() -> None:
    for alarm in ADVICE:
        address = urlsplit(view_of(Finding(alarm, ""), step=7))
        query = parse_qs(address.query, strict_parsing=True)
        assert address.path == "list" and set(query) <= FILTERS
        assert {key.removeprefix("-") for key in query.get("sort", [])} <= SORTS


def test_every_alarm_is_explained_on_its_page() -> None:
    page = (PROJECT / "features/alarms/README.md").read_text()
    assert [alarm for alarm in ADVICE if f"`{alarm}`" not in page] == []


def test_weights_that_were_not_synced_are_looked_for_in_every_step() -> None:
    assert view_of(Finding("engine_stale", ""), 4) == "list?kind=train&sort=-mismatch"
    assert view_of(Finding("advantages_zero", ""), 4) == (
        "list?kind=train&step=4&spread=0&sort=-reward"
    )


def test_a_place_leads_to_its_episode_and_odd_names_stay_one_part_of_the_address() -> None:
    place = Place(episode="a/b?c&d#é", row=2, token=17)
    assert view_of(Finding("end_ignored", "", place), 5) == (
        "episode/0/train/5/a%2Fb%3Fc%26d%23%C3%A9?row=2&token=17&color=fate"
    )
    assert view_of(Finding("group_size", "", Place(group="u 1")), 5) == "group/0/train/5/u%201"


def made_batch() -> DataProto:
    """Two groups, one of which has lost a member; row 2's token 1 was never sampled."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 0]])
    attended = torch.cat([torch.ones(3, 2, dtype=torch.long), mask], dim=1)
    attended[2, 3] = 0
    tensors = {
        "responses": torch.ones(3, 3, dtype=torch.long),
        "response_mask": mask,
        "attention_mask": attended,
    }
    columns = {
        "uid": np.array(["g0", "g0", "g1"], dtype=object),
        "episode_id": np.array(["e0", "e1", "e2"], dtype=object),
        "episode_row": np.array([0, 0, 3], dtype=object),
    }
    return DataProto.from_dict(tensors=tensors, non_tensors=columns)


def test_rules_name_the_episode_its_row_and_the_token() -> None:
    batch = made_batch()
    [finding] = unsampled_tokens(seen_step(batch))
    assert finding.place == Place(episode="e2", row=3, token=1)
    assert view_of(finding, 9) == "episode/0/train/9/e2?row=3&token=1&color=fate"


def test_rules_of_groups_name_the_group() -> None:
    batch = made_batch()
    config = changed(PPOConfig(), "actor_rollout_ref.rollout.n", 2)
    [finding] = uneven_groups(seen_step(batch, config=config))
    assert finding.place == Place(group="g1")
