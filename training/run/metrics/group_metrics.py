"""Computes a step's metrics of what teaches nothing: equal scores in a group, empty answers.

Invariant: episodes are counted, not rows; dummy rows never count, and an episode that is not
trained on counts nowhere.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from data.array_ops import row_blocks
from data.protocol import DataProto
from training.batch.episode_rows import EpisodeRows
from training.batch.row_groups import rows_by_key

# Scores of a group that differ by less are equal.
SMALLEST_SPREAD = 1e-6


def compute_group_metrics(batch: DataProto, special_ids: Sequence[int]) -> dict[str, float]:
    """Computes how much of a batch has nothing to teach, and its rows per episode.

    Args:
        batch: with token_level_scores, responses, response_mask (B, R), uid; turn_ids and
            episode_id where known.
        special_ids: ids of the tokens that are no text, as the end of a turn.
    Returns:
        groups/no_spread, a share of the groups of several episodes; response/empty_ratio, a share
        of the episodes; response/rows_per_episode. Nothing where no episode is trained on.
    """
    episodes = EpisodeRows(batch)
    is_live = episodes.fold(batch.batch["response_mask"].bool().any(-1), "amax") > 0
    if not is_live.any():
        return {}
    is_empty = episodes.fold(has_text(batch, special_ids), "amax") == 0
    metrics = {
        "response/empty_ratio": is_empty[is_live].double().mean().item(),
        "response/rows_per_episode": int(episodes.real.sum()) / len(is_live),
    }
    scores = episodes.fold(batch.batch["token_level_scores"].sum(-1))
    flat = _groups_are_flat(_uids(batch, episodes)[is_live.numpy()], scores[is_live].numpy())
    if flat:
        metrics["groups/no_spread"] = float(np.mean(flat))
    return metrics


def has_text(batch: DataProto, special_ids: Sequence[int]) -> Tensor:
    """Tells which rows hold a sampled token that is text, and no end of a turn: (B,) bool."""
    fields = batch.batch
    special = torch.tensor(list(special_ids), dtype=fields["responses"].dtype)
    found = torch.zeros(len(batch), dtype=torch.bool)
    for rows in row_blocks(fields["responses"]):
        is_sampled = fields["response_mask"][rows].bool()
        if "turn_ids" in fields:
            # A token that a correction has left out was said all the same.
            is_sampled = is_sampled | (fields["turn_ids"][rows] >= 0)
        found[rows] = (is_sampled & ~torch.isin(fields["responses"][rows], special)).any(-1)
    return found


def _uids(batch: DataProto, episodes: EpisodeRows) -> np.ndarray:
    """Returns the group of each real episode."""
    first = episodes.first[episodes.real.numpy()[episodes.first]]
    return np.asarray(batch.non_tensor_batch["uid"])[first].astype(str)


def _groups_are_flat(uids: np.ndarray, scores: np.ndarray) -> list[bool]:
    """Tells of each group of several episodes whether its scores are equal."""
    flat = []
    for members in rows_by_key(uids.tolist()).values():
        if len(members) > 1:
            flat.append(bool(np.ptp(scores[members]) < SMALLEST_SPREAD))
    return flat
