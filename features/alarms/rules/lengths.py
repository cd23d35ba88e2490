"""Looks for prompts, answers, episodes and turns that end at their limits, or are empty.

Invariant: a run whose turns were cut from its first step on rings only where nearly all are; one
whose turns began to be cut rings at half.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from features.alarms.finding import Finding
from features.alarms.rule import RulesWithMemory, rule
from features.alarms.seen_step import Metrics, SeenStep
from training.observers import ObservedRun

# Shares of prompts that fill theirs, where they may be cut, and of episodes without a token.
FULL_PROMPTS = 0.5
MOST_EMPTY = 0.75
# Shares of answers that fill their limit, and of turns that are cut.
FULL_ANSWERS = 0.7
CUT_TURNS = 0.95
# The share of cut turns in a run in which fewer than FEW_CUT_TURNS once were cut.
NEWLY_CUT_TURNS = 0.5
FEW_CUT_TURNS = 0.1
# Fewer episodes may end at their limits by chance.
FEWEST_EPISODES = 8


@rule(
    "prompts_pinned",
    advice="data.max_prompt_length: cut prompts are not the tasks that were meant",
    waits=True,
    view="sort=-tokens",
    settings=("data.max_prompt_length", "data.train_files", "data.truncation"),
    order=280,
)
@rule(
    "nothing_sampled",
    advice="environments that fail, and max_model_len: these episodes train nothing",
    waits=True,
    view="empty=1&sort=-reward",
)
def lost_prompts_and_answers(seen: SeenStep) -> Iterator[Finding]:
    """Finds prompts that are cut, and episodes that nothing is learned from."""
    config = seen.config
    metrics = seen.metrics
    cuts = config.data.truncation != "error" and not config.environments
    full = metrics.get("prompt_length/clip_ratio", 0.0)
    if cuts and full >= FULL_PROMPTS:
        yield Finding("prompts_pinned", f"{full:.0%} of prompts fill data.max_prompt_length")
    empty = metrics.get("response/aborted_ratio", 0.0)
    if empty > MOST_EMPTY:
        yield Finding("nothing_sampled", f"{empty:.0%} of episodes have no token to train on")


class LengthRules(RulesWithMemory):
    """Watches lengths over a run.

    Attributes:
        fewest_cut: the smallest share of a step's turns that was cut so far.
    """

    name = "lengths"

    def __init__(self, run: ObservedRun) -> None:
        super().__init__(run)
        self.fewest_cut = 1.0

    @rule(
        "length_pinned",
        advice=(
            "data.max_response_length, agent.max_turn_tokens, and whether the end-of-turn token "
            "is sampled"
        ),
        waits=True,
        view="sort=-tokens",
        settings=("data.max_response_length", "max_turn_tokens", "agent.max_turn"),
        order=360,
    )
    def pinned_lengths(self, seen: SeenStep) -> Iterator[Finding]:
        """Finds what ends at its limit in a step of several episodes, where turns may end early."""
        is_real = seen.episodes.real.numpy()[seen.episodes.first]
        may_be_long = seen.config.actor_rollout_ref.rollout.ignore_eos
        if is_real.sum() >= FEWEST_EPISODES and not may_be_long:
            yield from self.check(seen.metrics)

    def check(self, metrics: Metrics) -> Iterator[Finding]:
        """Finds what ends at its limit in a step."""
        episodes = max(metrics.get("agent/episodes", 0.0), 1.0)
        full = metrics.get("response_length/clip_ratio", 0.0)
        if full >= FULL_ANSWERS:
            yield Finding("length_pinned", f"{full:.0%} of answers fill data.max_response_length")
        overflowing = metrics.get("agent/ending/overflow", 0.0) / episodes
        if overflowing >= FULL_ANSWERS:
            yield Finding("length_pinned", f"{overflowing:.0%} of episodes overflow it")
        turns = episodes * metrics.get("agent/turns/mean", 0.0)
        if turns:
            yield from self._check_turns(metrics.get("agent/cut_turns", 0.0) / turns)

    def _check_turns(self, cut: float) -> Iterator[Finding]:
        """Finds turns that are cut: nearly all, or many where few were."""
        text = f"{cut:.0%} of turns were cut at their limit"
        if cut >= CUT_TURNS:
            yield Finding("length_pinned", text)
        elif cut > NEWLY_CUT_TURNS and self.fewest_cut < FEW_CUT_TURNS:
            yield Finding("length_pinned", f"{text}; in an earlier step {self.fewest_cut:.0%} were")
        self.fewest_cut = min(self.fewest_cut, cut)

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {"fewest_cut": self.fewest_cut}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`."""
        if "fewest_cut" in state:
            self.fewest_cut = state["fewest_cut"]
