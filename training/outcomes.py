"""Says what came of a step's groups, for a sampler that learns from it.

Invariant: an outcome does not depend on the order of a batch's rows, nor on dummy rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from custom.reward_managers.unscored import UNSCORED
from data.learning_sampler import TASK_INDEX, GroupOutcome
from data.protocol import DataProto
from training.batch.episode_rows import REWARD_INFO, EpisodeRows
from workers.rollout.episode import FAILURES


def outcomes_of(batch: DataProto) -> list[GroupOutcome]:
    """Lists the outcomes of a scored batch's groups, in the order of their names.

    An episode whose tokens have all been left out since it was played, as too old ones are, has
    neither a reward nor failed: its tokens alone count.

    Args:
        batch: with `token_level_scores` (B, R) and `task_index` (B,).
    """
    episodes = EpisodeRows(batch, by_conversation=False)
    rewards = episodes.totals(batch.batch["token_level_scores"]).tolist()
    is_trained = (episodes.lengths > 0).tolist()
    columns = batch.non_tensor_batch
    is_real = episodes.real[torch.from_numpy(episodes.first)].tolist()
    members: dict[str, list[int]] = defaultdict(list)
    for number, uid in enumerate(columns["uid"][episodes.first].tolist()):
        if is_real[number]:
            members[str(uid)].append(number)
    tokens = _sampled_tokens(batch, episodes)
    failed = _failures(batch, episodes, tokens)
    tasks = columns[TASK_INDEX][episodes.first].tolist()
    outcomes = []
    for _, group in sorted(members.items()):
        counted = [rewards[member] for member in group if is_trained[member] and not failed[member]]
        outcomes.append(
            GroupOutcome(
                task=int(tasks[group[0]]),
                rewards=tuple(sorted(counted)),
                failed=sum(failed[member] for member in group),
                tokens=sum(tokens[member] for member in group),
            )
        )
    return outcomes


def _sampled_tokens(batch: DataProto, episodes: EpisodeRows) -> list[int]:
    """Counts the tokens that were sampled in each episode, also those that were left out: (E,)."""
    sampled = batch.batch["response_mask"] > 0
    if "turn_ids" in batch.batch:
        sampled = batch.batch["turn_ids"] >= 0
    of_rows = sampled.sum(dim=1).tolist()
    counts = [sum(of_rows[row] for row in rows) for rows in episodes.rows]
    facts = batch.non_tensor_batch.get("episode_facts")
    if facts is not None:
        # What a failed episode sampled is in none of its rows.
        for number, each in enumerate(facts[episodes.first].tolist()):
            if each is not None:
                counts[number] = int(each["sampled_tokens"])
    return counts


def _failures(batch: DataProto, episodes: EpisodeRows, tokens: Sequence[int]) -> list[bool]:
    """Says of each episode whether it failed, or nobody scored it: (E,)."""
    failed = [number == 0 for number in tokens]
    columns = batch.non_tensor_batch
    if "episode_facts" in columns:
        for number, facts in enumerate(columns["episode_facts"][episodes.first].tolist()):
            failed[number] = facts is not None and facts["ending"] in FAILURES
    unscored = columns.get(REWARD_INFO + UNSCORED)
    if unscored is not None:
        for number, rows in enumerate(episodes.rows):
            failed[number] |= any(bool(unscored[row]) for row in rows)
    return failed


def as_plain(outcomes: Sequence[GroupOutcome]) -> list[dict[str, Any]]:
    """Returns outcomes as JSON holds them, for a batch's meta_info."""
    return [asdict(outcome) for outcome in outcomes]


def from_plain(entries: Sequence[dict[str, Any]]) -> list[GroupOutcome]:
    """Undoes `as_plain`."""
    return [GroupOutcome(**entry | {"rewards": tuple(entry["rewards"])}) for entry in entries]
