"""Keepers of episodes: what they add, and that one which raises costs itself alone."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from workers.rollout.episode import Episode
from workers.rollout.keepers import EpisodeKeeper, Keepers

EPISODES: Sequence[Any] = ("first", "second")


class Numbers(EpisodeKeeper):
    """Adds the length of an episode's name, and a column of ones."""

    column_types: ClassVar = {"ones": torch.int8}

    def after_policy(self, episode: Any, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"letters": len(episode)}

    def columns(self, width: int) -> Mapping[str, Tensor]:
        return {"ones": torch.ones(len(EPISODES), width, dtype=torch.int8)}


class Failing(Numbers):
    """Raises at one of the calls."""

    column_types: ClassVar = {"twos": torch.float32}

    def __init__(self, at: str) -> None:
        self.at = at

    def fail(self, at: str) -> None:
        if at == self.at:
            raise RuntimeError(f"the disk is full at {at}")

    def begin(self, episodes: Sequence[Episode]) -> None:
        self.fail("begin")

    def before_policy(self, episode: Episode) -> None:
        self.fail("before_policy")

    def after_policy(self, episode: Episode, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        self.fail("after_policy")
        return {"seen": True}

    def columns(self, width: int) -> Mapping[str, Tensor]:
        self.fail("columns")
        return {"twos": torch.full((len(EPISODES), width), 2.0)}


def keep(keepers: Keepers) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Asks all that is asked of a batch of EPISODES; returns their facts and the columns."""
    keepers.begin(EPISODES)
    facts = []
    for episode in EPISODES:
        keepers.before_policy(episode)
        facts.append(keepers.after_policy(episode, {}))
    return facts, keepers.columns(len(EPISODES), 3)


@pytest.fixture
def as_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.rollout.keepers.raises_faults", lambda: False)


def test_keepers_add_facts_and_columns() -> None:
    facts, columns = keep(Keepers({"numbers": Numbers(), "fine": Failing("never")}))
    assert facts == [{"letters": 5, "seen": True}, {"letters": 6, "seen": True}]
    assert columns["ones"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert columns["twos"].tolist() == [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]


@pytest.mark.parametrize("at", ["begin", "before_policy", "after_policy", "columns"])
@pytest.mark.usefixtures("as_in_a_run")
def test_a_keeper_that_raises_costs_itself_and_is_told_once(
    at: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    keepers = Keepers({"failing": Failing(at), "numbers": Numbers()})
    for _ in range(2):
        facts, columns = keep(keepers)
        assert [each["letters"] for each in facts] == [5, 6]
        assert columns["ones"].sum() == 6
        # Other ranks have the column, and rows of all ranks are joined.
        assert columns["twos"].dtype == torch.float32
        assert columns["twos"].shape == (2, 3)
        assert columns["twos"].sum() == 0
    assert [record.message for record in caplog.records] == [
        "the keeper of episodes of failing is off, the run goes on without it"
    ]
    assert f"the disk is full at {at}" in caplog.text


@pytest.mark.usefixtures("as_in_a_run")
def test_columns_that_are_not_as_the_class_says_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Wider(Numbers):
        def columns(self, width: int) -> Mapping[str, Tensor]:
            return {"ones": torch.ones(len(EPISODES), width + 1, dtype=torch.int8)}

    _, columns = keep(Keepers({"wider": Wider()}))
    assert columns["ones"].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert "columns returned {'ones': ((2, 4), torch.int8)}" in caplog.text


@pytest.mark.usefixtures("as_in_a_run")
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_ctrl_c_and_out_of_memory_pass_through(error: type[BaseException]) -> None:
    class Ended(EpisodeKeeper):
        def begin(self, episodes: Sequence[Episode]) -> None:
            raise error

    with pytest.raises(error):
        keep(Keepers({"ended": Ended()}))


def test_in_the_suite_a_keeper_that_raises_fails_the_test() -> None:
    with pytest.raises(RuntimeError, match="the disk is full at begin"):
        keep(Keepers({"failing": Failing("begin")}))


@pytest.mark.parametrize("field", ["response_mask", "advantages", "environment_rewards"])
def test_a_column_that_the_trainer_writes_is_refused_at_the_start(field: str) -> None:
    class Replacing(Numbers):
        column_types: ClassVar = {"ones": torch.int8, field: torch.int8}

    with pytest.raises(ValueError, match=f"feature mine \\(Replacing\\) names '{field}'"):
        Keepers({"mine": Replacing()})


def test_a_column_of_two_keepers_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="a column of the keeper of first"):
        Keepers({"first": Numbers(), "second": Numbers()})


def test_a_column_that_an_edit_of_the_batch_writes_is_not_replaced() -> None:
    with pytest.raises(ValueError, match="'ones' in its column_types, which is what the batch has"):
        Keepers({"numbers": Numbers()}).columns(len(EPISODES), 3, taken={"ones"})


@pytest.mark.usefixtures("as_in_a_run")
def test_a_keeper_changes_no_fact_of_an_episode(caplog: pytest.LogCaptureFixture) -> None:
    keepers = Keepers({"numbers": Numbers()})
    assert keepers.after_policy(EPISODES[0], {"letters": 3}) == {}  # type: ignore[arg-type]
    assert "letters, which the episode's facts have" in caplog.text
