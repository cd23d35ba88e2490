"""Asks for branches of episodes: the hook by which a state is continued from more than once.

    an episode is played        its environment's states are kept, where the rule names a function
    it has ended                `begins` says where branches of it begin; they are played in the
                                same batch, beside all else, and stand in `Episode.branches`
    the batch becomes rows      `columns` adds what they earned

Branches are no rows of the batch; the failure policy holds for them as for any episode. Invariant:
a rule decides by the episode alone, so that ranks that share an engine and resumed runs decide
alike; without a rule nothing is kept and nothing asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from data.loading import load_object
from data.protocol import DataProto
from training.features import named
from workers.rollout.begin import Begin, Restore
from workers.rollout.episode import Episode

if TYPE_CHECKING:
    import torch.distributed as dist

    from training.config import PPOConfig
    from workers.rollout.kinds import EpisodeSpec
    from workers.rollout.questions import QuestionRule


class BranchRule:
    """Decides where branches begin, and what they tell of their episode; by default nothing."""

    def prepare(self, described: DataProto) -> None:
        """Sees the episodes that are to be played, on every rank, before they begin."""

    def keeps(self, episode: Episode) -> Restore | None:
        """Names what is called with the agent before the next turn; its text is kept as the state.

        None: the state before that turn is not needed.
        """
        return None

    def begins(self, episode: Episode) -> Sequence[Begin]:
        """Says where branches of an episode begin that has ended."""
        return ()

    def columns(self, episodes: Sequence[Episode]) -> Mapping[str, Sequence[Any]]:
        """Returns columns of the batch by name, an entry for each episode."""
        return {}


def branch_of(episode: Episode, begin: Begin) -> Episode:
    """Makes a branch of an episode; its task, and its place in the step, are the episode's."""
    return Episode(
        group=episode.group,
        sample=episode.sample,
        spec=episode.spec,
        seed=episode.seed,
        task=episode.task,
        begin=begin,
    )


def open_branches(
    config: PPOConfig, specs: Sequence[EpisodeSpec], group: dist.ProcessGroup | None
) -> BranchRule | None:
    """Opens what the feature brings that asks for branches; None: the config wants none.

    Args:
        specs: who plays. group: the ranks that share the engine.
    """
    for feature, place in named("branches"):
        rule: BranchRule | None = load_object(place, f"feature {feature}")(config, specs, group)
        return rule
    return None


def refuse_questions(branches: BranchRule | None, questions: QuestionRule | None) -> None:
    """Raises ValueError where environments may ask the policy, and branches be asked for.

    A branch takes over the turns before it as they were recorded; what an environment asked
    meanwhile is in no record of a turn.
    """
    if branches is not None and questions is not None:
        [(branching, _)] = named("branches")
        [(asking, _)] = named("questions")
        raise ValueError(
            f"this run continues from states of its episodes (features/{branching}) and lets "
            f"environments ask the policy (features/{asking}): what was asked before a state "
            "cannot be had again, so turn one of the two off"
        )


def branch_columns(
    rule: BranchRule, episodes: Sequence[Episode], descriptions: np.ndarray
) -> dict[str, np.ndarray]:
    """Makes the rule's columns for rows, each of which has what its episode has.

    Args:
        descriptions: (B,) the number of each row's episode.
    """
    columns = {}
    for name, values in rule.columns(episodes).items():
        column = np.empty(len(descriptions), dtype=object)
        for row, description in enumerate(descriptions.tolist()):
            column[row] = values[description]
        columns[name] = column
    return columns
