"""What of an episode counts as a summary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from features.context.counts import CONTEXTS, ContextKeeper, context_metrics
from workers.rollout.episode import Turn


def test_what_a_class_has_the_policy_write_counts_and_what_an_environment_asks_does_not() -> None:
    turns = [
        Turn(text="go", finish_reason="stop", tokens=3),
        Turn(text="3 of 4", finish_reason="stop", tokens=5, writes="note"),
        Turn(text="is right", finish_reason="stop", tokens=7, writes="critic", aside=True),
        Turn(text="4 of 4", tokens=2, writes="summary", finish_reason="length"),
    ]
    seam = SimpleNamespace(dropped=2, fault="", tokens=9)
    episode: Any = SimpleNamespace(rows=[SimpleNamespace(seam=seam)], turns=turns)
    facts = {**ContextKeeper().after_policy(episode, {}), "sampled_tokens": 14}
    assert facts[CONTEXTS]["summaries"] == 2 and facts[CONTEXTS]["summary_tokens"] == [5, 2]
    metrics = context_metrics([facts], always=True)
    assert metrics["context/summaries"] == 2.0 and metrics["context/summaries_cut"] == 1.0
    assert metrics["context/summary_tokens/share"] == 0.5
