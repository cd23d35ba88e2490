"""Computes a step's metrics of what teaches nothing: equal scores in a group, empty answers.

Invariant: episodes are counted, not rows; dummy rows never count, and an episode that is not
trained on counts nowhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.array_ops import row_blocks
from data.protocol import DataProto
from training.batch.episode_rows import EpisodeRows, group_keys
from training.batch.row_groups import rows_by_key

# Scores of a group that differ by less are equal.
SMALLEST_SPREAD = 1e-6


@dataclass(frozen=True)
class EpisodeScores:
    """Holds the E episodes of a batch that are trained on.

    Attributes:
        rows: (E,) each one's first row.
        groups: (E,) its group: the same prompt, and where several play, the same role.
        scores: (E,) float64, the sum over its rows.
        is_empty: (E,) bool, nothing that it says is text.
    """

    rows: np.ndarray
    groups: np.ndarray
    scores: np.ndarray
    is_empty: np.ndarray


def episode_scores(
    batch: DataProto, episodes: EpisodeRows, textless_ids: Sequence[int]
) -> EpisodeScores:
    """Reads the episodes of a batch, without dummies and without those that are not trained on.

    Args:
        batch: with token_level_scores, responses, response_mask (B, R), uid; turn_ids where known.
        textless_ids: ids of the tokens that are no text, as the end of a turn.
    """
    fields = batch.batch
    is_live = (episodes.fold(fields["response_mask"].bool().any(-1), "amax") > 0).numpy()
    rows = episodes.first[episodes.real.numpy()[episodes.first]][is_live]
    return EpisodeScores(
        rows=rows,
        groups=group_keys(batch)[rows].astype(str),
        scores=episodes.fold(fields["token_level_scores"].sum(-1)).numpy()[is_live],
        is_empty=(episodes.fold(has_text(batch, textless_ids), "amax") == 0).numpy()[is_live],
    )


def compute_group_metrics(batch: DataProto, textless_ids: Sequence[int]) -> dict[str, float]:
    """Computes how much of a batch has nothing to teach, and its rows per episode.

    Args:
        batch, textless_ids: as `episode_scores` reads them.
    Returns:
        groups/no_spread, a share of the groups of several episodes; response/empty_ratio, a share
        of the episodes; response/rows_per_episode. Nothing where no episode is trained on.
    """
    episodes = EpisodeRows(batch)
    found = episode_scores(batch, episodes, textless_ids)
    if not len(found.rows):
        return {}
    num_rows = sum(len(rows) for rows in episodes.rows if episodes.real[rows[0]])
    num_episodes = int(episodes.real[torch.from_numpy(episodes.first)].sum())
    metrics = {
        "response/empty_ratio": float(found.is_empty.mean()),
        "response/rows_per_episode": num_rows / num_episodes,
    }
    flat = []
    for members in rows_by_key(found.groups.tolist()).values():
        if len(members) > 1:
            flat.append(np.ptp(found.scores[members]) < SMALLEST_SPREAD)
    if flat:
        metrics["groups/no_spread"] = float(np.mean(flat))
    return metrics


def has_text(batch: DataProto, textless_ids: Sequence[int]) -> Tensor:
    """Tells which rows hold a sampled token that is text, and no end of a turn: (B,) bool."""
    fields = batch.batch
    textless = torch.tensor(list(textless_ids), dtype=fields["responses"].dtype)
    found = torch.zeros(len(batch), dtype=torch.bool)
    for rows in row_blocks(fields["responses"]):
        is_sampled = fields["response_mask"][rows].bool()
        if "turn_ids" in fields:
            # A token that a correction has left out was said all the same.
            is_sampled = is_sampled | (fields["turn_ids"][rows] >= 0)
        found[rows] = (is_sampled & ~torch.isin(fields["responses"][rows], textless)).any(-1)
    return found
