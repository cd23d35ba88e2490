"""Counts continuations and their tokens: facts of episodes, and a step's metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from data.turn_tokens import TurnTokens
from features.branching.measured import measure
from features.branching.settings import BranchingSettings
from training.batch.episode_rows import real_rows
from training.config import PPOConfig
from training.observers import ObservedRun, Observer, StepReport
from workers.rollout.begin import SAME
from workers.rollout.episode import Episode
from workers.rollout.keepers import EpisodeKeeper

# The name of the episode's facts.
BRANCHES = "branches"


def open_keeper(config: PPOConfig, tokens: TurnTokens) -> BranchKeeper | None:
    """Opens the keeper; None where there are no continuations."""
    if not config.section(BranchingSettings).is_on:
        return None
    return BranchKeeper(config)


def open_observer(run: ObservedRun) -> BranchObserver | None:
    """Opens the observer; None where there are no continuations."""
    if not run.config.section(BranchingSettings).is_on:
        return None
    return BranchObserver()


class BranchKeeper(EpisodeKeeper):
    """Puts what an episode's continuations earned and cost among its facts."""

    def __init__(self, config: PPOConfig) -> None:
        self.config = config

    def after_policy(self, episode: Episode, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the numbers; nothing of an episode without a turn."""
        if not episode.turns:
            return {}
        measured = measure(episode, self.config.agent, self.config.algorithm.turn_gamma)
        return {BRANCHES: measured.as_fact()}


class BranchObserver(Observer):
    """Adds the metrics of continuations to a step's."""

    def step_made(self, report: StepReport) -> Mapping[str, float] | None:
        """Returns the metrics of the step's episodes."""
        facts = report.batch.non_tensor_batch.get("episode_facts", ())
        # A dummy row has the facts of the row that it copies.
        is_real = real_rows(report.batch).tolist()
        return branch_metrics(
            [each for each, real in zip(facts, is_real, strict=False) if real and each is not None]
        )


def branch_metrics(facts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Counts the continuations of a step's episodes, and their tokens."""
    counted = [each[BRANCHES] for each in facts if BRANCHES in each]
    endings: Counter[str] = Counter()
    for each in counted:
        endings.update(each["endings"])
    of_branches = sum(each["sampled_tokens"] for each in counted)
    turns = sum(len(each["returns"]) for each in counted)
    valued = sum(1 for each in counted for returns in each["returns"] if returns)
    return {
        "branching/continuations": float(sum(endings.values())),
        "branching/turns/share": valued / max(turns, 1),
        "branching/same": float(endings[SAME]),
        "branching/left_out": float(sum(each["left_out"] for each in counted)),
        "branching/overflow": float(endings["overflow"]),
        "branching/refused_states": float(sum(each["refused"] for each in counted)),
        "branching/sampled_tokens": float(of_branches),
        "branching/prefilled_tokens": float(sum(each["prefilled_tokens"] for each in counted)),
    }
