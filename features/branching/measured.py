"""Reads what continuations earned, once the failure policy was applied to them.

A continuation that is left out of training by the failure policy is left out here, too, and
counted; one that failed and is not left out earned what a failed episode earns. Invariant: no
continuation is left out without being counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from features.branching.states import REFUSAL
from training.config import AgentConfig
from workers.rollout.begin import DIFFERS, SAME
from workers.rollout.episode import FAILURES, Episode, Turn
from workers.rollout.episode_facts import own_turns
from workers.rollout.failure_policy import is_masked


@dataclass
class MeasuredEpisode:
    """Holds what the continuations of an episode earned, and what they cost.

    Attributes:
        returns: of each turn, of its continuations that count.
        rewards, tokens, texts: of each of the episode's own turns.
        endings: how many ended how.
        left_out: of those that do not count, a reason of each.
        refused: turns whose state could not be taken, a reason of each.
        sampled_tokens: by the continuations, in all their attempts.
        prefilled_tokens: of the prompts with which they began.
    """

    returns: list[list[float]]
    rewards: list[float]
    tokens: list[int]
    texts: list[str]
    endings: Counter[str] = field(default_factory=Counter)
    left_out: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    sampled_tokens: int = 0
    prefilled_tokens: int = 0

    def as_fact(self) -> dict[str, Any]:
        """Returns the numbers, and the first reasons, as plain data."""
        return {
            "returns": self.returns,
            "rewards": self.rewards,
            "tokens": self.tokens,
            "texts": self.texts,
            "endings": dict(self.endings),
            "left_out": len(self.left_out),
            "refused": len(self.refused),
            "reasons": sorted({*self.left_out, *self.refused})[:3],
            "sampled_tokens": self.sampled_tokens,
            "prefilled_tokens": self.prefilled_tokens,
        }


def measure(episode: Episode, agent: AgentConfig, turn_gamma: float) -> MeasuredEpisode:
    """Measures an episode's branches, in the order in which they were asked for."""
    own = turn_rewards(episode)
    measured = MeasuredEpisode(
        returns=[[] for _ in episode.turns],
        rewards=own,
        tokens=[turn.tokens for turn in episode.turns],
        texts=[turn.text for turn in episode.turns],
    )
    for state in episode.states:
        if state.startswith(REFUSAL):
            measured.refused.append(state.removeprefix(REFUSAL))
    for branch in episode.branches:
        assert branch.begin is not None
        turn = branch.begin.turn
        measured.endings[branch.ending] += 1
        measured.sampled_tokens += sampled_tokens(branch)
        measured.prefilled_tokens += prefilled_tokens(branch, episode)
        if branch.ending == DIFFERS:
            measured.left_out.append(branch.error or DIFFERS)
        elif not counts(branch, agent):
            measured.left_out.append(branch.error or branch.ending)
        else:
            rewards = own if branch.ending == SAME else turn_rewards(branch)
            measured.returns[turn].append(discounted(rewards[turn:], turn_gamma))
    return measured


def counts(branch: Episode, agent: AgentConfig) -> bool:
    """Checks whether a continuation counts: it is not left out by the failure policy."""
    if branch.ending == DIFFERS:
        return False
    return branch.ending not in FAILURES or not is_masked(branch.ending, agent)


def turn_rewards(episode: Episode) -> list[float]:
    """Adds up the rewards that lie on the tokens of each turn."""
    rewards = [0.0] * len(episode.turns)
    for row in episode.rows:
        for span in row.spans:
            for place in range(span.start, span.end):
                rewards[span.turn] += row.reward_at.get(place, 0.0)
    return rewards


def discounted(rewards: list[float], turn_gamma: float) -> float:
    """Returns the discounted sum, the first reward counting whole."""
    total = 0.0
    for reward in reversed(rewards):
        total = reward + turn_gamma * total
    return total


def sampled_tokens(branch: Episode) -> int:
    """Counts the tokens that a branch sampled, in attempts that failed, too."""
    return sum(turn.tokens for turns in _sampled_turns(branch) for turn in turns)


def prefilled_tokens(branch: Episode, episode: Episode) -> int:
    """Counts the tokens of the prompts that a branch began to sample behind, in each attempt."""
    assert branch.begin is not None
    attempts = sum(1 for turns in _sampled_turns(branch) if turns)
    turn = branch.begin.turn
    # The policy on failures takes a branch's own rows away.
    return attempts * (_prompt_of(branch, turn) or _prompt_of(episode, turn))


def _sampled_turns(branch: Episode) -> list[Sequence[Turn]]:
    """Lists the turns that a branch sampled, of each attempt."""
    attempts = [branch.turns, *(attempt.turns for attempt in branch.failed_attempts)]
    return [own_turns(branch, turns) for turns in attempts]


def _prompt_of(episode: Episode, turn: int) -> int:
    """Counts the tokens before a turn, in its row; 0: there is no such turn."""
    for row in episode.rows:
        for span in row.spans:
            if span.turn == turn:
                return len(row.prompt_ids) + span.start
    return 0
