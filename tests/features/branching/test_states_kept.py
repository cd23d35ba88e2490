"""Which states of an episode are taken: those from which branches may begin."""

from __future__ import annotations

import pytest

from features.branching.proof import Proved
from features.branching.sampling import BranchSampling
from features.branching.settings import BranchingSettings
from tests.conftest import PROJECT
from training.config.loader import load_config
from workers.rollout.episode import Episode, Turn

GAME = str(PROJECT / "configs/quickstart.yaml")
ROLLOUT_N = "actor_rollout_ref.rollout.n"
VINE = ("algorithm.adv_estimator=vine", "branching.at=every")
TURNS = 5


def taken(*words: str, way: str = "snapshot") -> list[int]:
    """The turns before which a state is taken of an episode of five."""
    config = load_config([GAME, *words], check=False).config
    rule = BranchSampling(config, config.section(BranchingSettings), [], None)
    rule.proved[0] = Proved(way, {})
    episode = Episode(group=0, sample=0)
    turns = []
    for turn in range(TURNS):
        if rule.keeps(episode) is not None:
            turns.append(turn)
        episode.turns.append(Turn(text="", finish_reason="stop"))
    return turns


@pytest.mark.parametrize("way", ["snapshot", "copy"])
@pytest.mark.parametrize(
    ("words", "turns"),
    [
        (("branching.at=[0,3]",), [0, 3]),
        (("branching.at=[9]",), []),
        # Which turn is the last, or is drawn, is known behind the episode's end alone.
        (("branching.at=last",), [0, 1, 2, 3, 4]),
        (("branching.at=random",), [0, 1, 2, 3, 4]),
        # The group's other episodes continue from the first state.
        ((*VINE, f"{ROLLOUT_N}=2"), [1, 2, 3, 4]),
        ((*VINE, f"{ROLLOUT_N}=1"), [0, 1, 2, 3, 4]),
        ((*VINE, f"{ROLLOUT_N}=2", "branching.first_turn=true"), [0, 1, 2, 3, 4]),
        # A summary may be written between two turns.
        (("branching.at=[3]", "agent.context=summarise"), [0, 1, 2, 3, 4]),
    ],
)
def test_a_state_is_taken_where_branches_may_begin(
    words: tuple[str, ...], turns: list[int], way: str
) -> None:
    assert taken(*words, way=way) == turns


def test_no_state_is_taken_that_is_played_again() -> None:
    assert taken("branching.at=every", way="replay") == []
