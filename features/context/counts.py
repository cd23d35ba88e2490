"""Counts contexts, summaries and their tokens: facts of episodes, and a step's metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from data.turn_tokens import TurnTokens
from training.batch.episode_rows import episode_facts
from training.config import PPOConfig
from training.observers import ObservedRun, Observer, StepReport
from workers.rollout.episode import Episode
from workers.rollout.history import KEEP
from workers.rollout.keepers import EpisodeKeeper

# The name of the episode's facts.
CONTEXTS = "contexts"


def open_keeper(config: PPOConfig, tokens: TurnTokens) -> ContextKeeper:
    """Opens the keeper; an environment may begin contexts where the config does not."""
    return ContextKeeper()


def open_observer(run: ObservedRun) -> ContextObserver:
    """Opens the observer."""
    return ContextObserver(always=run.config.agent.context != KEEP)


class ContextKeeper(EpisodeKeeper):
    """Puts the counts of an episode's contexts among its facts, where it has several."""

    def after_policy(self, episode: Episode, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the counts; nothing of an episode of one context."""
        seams = [row.seam for row in episode.rows if row.seam is not None]
        # Summaries, and what a class of the user's has the policy write.
        written = [turn for turn in episode.turns if turn.writes and not turn.aside]
        if not seams and not written:
            return {}
        return {
            CONTEXTS: {
                "contexts": len(seams) + 1,
                "messages_dropped": sum(seam.dropped for seam in seams),
                "summaries": len(written),
                "summary_tokens": [turn.tokens for turn in written],
                "summaries_cut": sum(turn.finish_reason == "length" for turn in written),
                "faults": sum(bool(seam.fault) for seam in seams),
                "longest": max(seam.tokens for seam in seams) if seams else 0,
            }
        }


class ContextObserver(Observer):
    """Adds the metrics of contexts to a step's.

    Args:
        always: a step in which no episode began a second context has them too.
    """

    def __init__(self, always: bool) -> None:
        self.always = always

    def step_made(self, report: StepReport) -> Mapping[str, float] | None:
        """Returns the metrics of the step's episodes."""
        return context_metrics(episode_facts(report.batch), self.always)

    def validation_made(self, facts: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
        """Returns those of a validation's episodes."""
        return context_metrics(facts, self.always)


def context_metrics(facts: Sequence[Mapping[str, Any]], always: bool) -> dict[str, float]:
    """Counts the contexts of a step's episodes; nothing where none began a second one.

    Args:
        always: also where none did.
    """
    counted = [each[CONTEXTS] for each in facts if CONTEXTS in each]
    if not facts or not (counted or always):
        return {}
    contexts = [each.get(CONTEXTS, {}).get("contexts", 1) for each in facts]
    tokens = [length for each in counted for length in each["summary_tokens"]]
    metrics = {
        "context/per_episode/mean": float(np.mean(contexts)),
        "context/per_episode/max": float(max(contexts)),
        "context/messages_dropped": float(sum(each["messages_dropped"] for each in counted)),
        "context/summaries": float(len(tokens)),
        "context/summaries_cut": float(sum(each["summaries_cut"] for each in counted)),
        "context/faults": float(sum(each["faults"] for each in counted)),
    }
    if tokens:
        metrics["context/summary_tokens/mean"] = float(np.mean(tokens))
        metrics["context/summary_tokens/max"] = float(max(tokens))
        sampled = sum(each["sampled_tokens"] for each in facts)
        metrics["context/summary_tokens/share"] = sum(tokens) / max(sampled, 1)
    return metrics
