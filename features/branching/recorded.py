"""Puts an episode's branches into its record: what each earned, and the words that it began with.

    turn 3 of the episode    open the left box
    its branch               open the right box, then wait
                                  ^ character 9: "right box, then wait", at most MOST_CHARS of it

Invariant: an entry is plain data of a bounded size, whatever a policy says: MOST_LISTED branches of
an episode, of whose words ALL_CHARS characters together; the others are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from features.branching.measured import counts, measure, sampled_tokens, turn_rewards
from features.branching.settings import BranchingSettings
from training.config import PPOConfig
from workers.rollout.begin import SAME
from workers.rollout.episode import Episode

# The entry of a record.
BRANCHES = "branches"
MOST_LISTED = 2000
# Characters of the words of a branch, and of all branches of an episode.
MOST_CHARS = 160
ALL_CHARS = 1 << 16
MOST_REASON_CHARS = 300


def open_entries(config: PPOConfig) -> Callable[[Episode], Mapping[str, Any]] | None:
    """Opens what adds branches to records; None where there are none."""
    if not config.section(BranchingSettings).is_on:
        return None
    return lambda episode: branch_entries(episode, config)


def branch_entries(episode: Episode, config: PPOConfig) -> dict[str, Any]:
    """Returns the entry of an episode's branches; nothing of an episode that has none."""
    if not episode.branches:
        return {}
    listed = episode.branches[:MOST_LISTED]
    most_chars = min(MOST_CHARS, ALL_CHARS // len(listed))
    turn_gamma = config.algorithm.turn_gamma
    # The returns of a turn are in the order of its branches that count.
    returns = [iter(of_turn) for of_turn in measure(episode, config.agent, turn_gamma).returns]
    entries = []
    for branch in listed:
        assert branch.begin is not None
        entry = branch_entry(branch, episode, most_chars)
        if counts(branch, config.agent):
            entry["return"] = next(returns[branch.begin.turn])
        else:
            entry["left_out"] = (branch.error or branch.ending)[:MOST_REASON_CHARS]
        entries.append(entry)
    return {
        BRANCHES: {
            "listed": entries,
            "not_listed": len(episode.branches) - len(listed),
            "own_returns": own_returns(turn_rewards(episode), turn_gamma),
        }
    }


def own_returns(rewards: list[float], turn_gamma: float) -> list[float]:
    """Returns what an episode itself earned from each turn on, discounted as branches are."""
    total = 0.0
    returns = []
    for reward in reversed(rewards):
        total = reward + turn_gamma * total
        returns.append(total)
    return returns[::-1]


def branch_entry(branch: Episode, episode: Episode, most_chars: int) -> dict[str, Any]:
    """Returns a branch as plain data.

    Args:
        most_chars: of its words.
    Returns:
        turn: with which it begins. word: what tells it from others. ending, turns, tokens: of what
        it played and sampled itself. return: from its first turn on; null where it is left out.
        differs: the turn and the character from which on it says something else than
        its episode, null where it says nothing else; words: what it says from there on.
    """
    assert branch.begin is not None
    differs = first_difference(branch, episode)
    entry: dict[str, Any] = {
        "turn": branch.begin.turn,
        "word": branch.begin.word,
        "return": None,
        "ending": branch.ending,
        "turns": max(len(branch.turns) - branch.begin.turn, 0),
        "tokens": sampled_tokens(branch),
        "differs": differs,
        "words": "",
    }
    if differs is not None:
        turn, place = differs
        said = branch.turns[turn].text if turn < len(branch.turns) else ""
        entry["words"] = said[place : place + most_chars]
    return entry


def first_difference(branch: Episode, episode: Episode) -> list[int] | None:
    """Finds the turn, and the character at which a word begins, from which on the texts differ.

    Where one goes on and the other has ended, that is the end; None: all is said alike.
    """
    assert branch.begin is not None
    if branch.ending == SAME:
        return None
    longest = max(len(branch.turns), len(episode.turns))
    for turn in range(branch.begin.turn, longest):
        said, own = (
            each.turns[turn].text if turn < len(each.turns) else "" for each in (branch, episode)
        )
        if said != own or turn >= min(len(branch.turns), len(episode.turns)):
            return [turn, word_before(own, common_length(said, own))]
    return None


def common_length(first: str, second: str) -> int:
    """Counts the characters with which both texts begin, by halves: texts may be long."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def word_before(text: str, place: int) -> int:
    """Returns where the word begins that has this place; the place itself in a very long word."""
    for start in range(place, max(place - MOST_CHARS // 4, 0), -1):
        if text[start - 1].isspace():
            return start
    return 0 if place < MOST_CHARS // 4 else place
