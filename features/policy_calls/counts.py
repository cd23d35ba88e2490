"""Counts what episodes asked the policy: facts of episodes, and a step's metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from data.turn_tokens import TurnTokens
from features.policy_calls.settings import PolicyCallsSettings
from training.batch.episode_rows import episode_facts
from training.config import PPOConfig
from training.observers import ObservedRun, Observer, StepReport
from workers.rollout.episode import Episode
from workers.rollout.keepers import EpisodeKeeper

# The name of the episode's facts.
CALLS = "policy_calls"


def open_keeper(config: PPOConfig, tokens: TurnTokens) -> CallsKeeper | None:
    """Opens the keeper where the policy may be asked."""
    return CallsKeeper() if config.section(PolicyCallsSettings).enable else None


def open_observer(run: ObservedRun) -> CallsObserver | None:
    """Opens the observer where the policy may be asked."""
    return CallsObserver() if run.config.section(PolicyCallsSettings).enable else None


class CallsKeeper(EpisodeKeeper):
    """Puts the counts of an episode's questions among its facts."""

    def after_policy(self, episode: Episode, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the counts."""
        return {CALLS: dict(episode.asked)}


class CallsObserver(Observer):
    """Adds the metrics of questions to a step's."""

    def step_made(self, report: StepReport) -> Mapping[str, float] | None:
        """Returns the metrics of the step's episodes."""
        return calls_metrics(episode_facts(report.batch))

    def validation_made(self, facts: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
        """Returns those of a validation's episodes."""
        return calls_metrics(facts)


def calls_metrics(facts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Counts the answers of a step's episodes."""
    counted = [each.get(CALLS, {}) for each in facts]
    if not counted:
        return {}
    answers = [each.get("answers", 0.0) for each in counted]
    tokens = sum(each.get("tokens", 0.0) for each in counted)
    sampled = sum(each["sampled_tokens"] for each in facts)
    return {
        "policy_calls/per_episode/mean": float(np.mean(answers)),
        "policy_calls/per_episode/max": float(max(answers)),
        "policy_calls/refused": float(sum(each.get("refused", 0.0) for each in counted)),
        "policy_calls/paid": float(sum(each.get("paid", 0.0) for each in counted)),
        "policy_calls/tokens/mean": tokens / max(sum(answers), 1.0),
        "policy_calls/tokens/share": tokens / max(sampled, 1),
    }
