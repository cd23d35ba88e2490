"""Counts continuations and their tokens: facts of episodes, and a step's metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from data.protocol import DataProto
from data.turn_tokens import TurnTokens
from data.warn_once import warn_first
from features.branching.measured import measure
from features.branching.settings import BranchingSettings
from training.batch.episode_rows import episode_facts
from training.config import PPOConfig
from training.observers import ObservedRun, Observer, StepReport
from workers.rollout.begin import SAME
from workers.rollout.episode import Episode
from workers.rollout.keepers import EpisodeKeeper

# The name of the episode's facts.
BRANCHES = "branches"
# A larger part of the continuations that fails is told.
LARGE_SHARE = 0.1


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
    """Adds the metrics of continuations to a step's.

    What dynamic sampling leaves out was sampled all the same, and counts.
    """

    def __init__(self) -> None:
        # By step, of all its batches that were played.
        self.facts: dict[int, list[Mapping[str, Any]]] = {}

    def played(self, batch: DataProto, step: int, validate: bool) -> None:
        """Keeps the facts of a step's episodes."""
        if not validate:
            self.facts.setdefault(step, []).extend(episode_facts(batch))

    def step_made(self, report: StepReport) -> Mapping[str, float] | None:
        """Returns the metrics of the step's episodes."""
        facts = self.facts.pop(report.step, episode_facts(report.batch))
        metrics = branch_metrics(facts)
        for subject, problem in step_problems(metrics, facts):
            warn_first(__name__, subject, f"branching: in step {report.step} {problem}")
        return metrics


def step_problems(
    metrics: Mapping[str, float], facts: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Yields what keeps continuations from being had or from counting: a word, and a sentence."""
    reasons = [reason for each in facts if BRANCHES in each for reason in each[BRANCHES]["reasons"]]
    first_line = reasons[0].partition("\n")[0] if reasons else ""
    why = f": {first_line}" if first_line else ""
    continuations = metrics["branching/continuations"]
    left_out = metrics["branching/left_out"]
    refused = metrics["branching/refused_states"]
    if refused:
        told = f"{refused:.0f} states could not be taken, and nothing goes on from them{why}"
        yield "refused", told
    elif not continuations:
        yield (
            "none",
            "no state was continued from: the episodes have no turn that branching.at names, or "
            "only the first, from which the group's other episodes go on (branching.first_turn)",
        )
    if left_out > LARGE_SHARE * continuations:
        yield (
            "left out",
            f"{left_out:.0f} of {continuations:.0f} continuations do not count, as they failed, so "
            f"that those that count are a selection{why}",
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
