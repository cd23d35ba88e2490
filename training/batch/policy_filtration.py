"""Draws the rows of a batch anew by the scores of their episodes: PF-PPO (core_algos/pf_ppo.py).

Invariant: the batch that is drawn from stays as it is; neither dummy rows nor rows without a
sampled token are drawn.
"""

from data.protocol import DataProto
from training.batch.episode_rows import EpisodeRows, real_rows
from training.core_algos.pf_ppo import draw_rows_by_score


def compute_pf_ppo_reweight_data(
    data: DataProto, reweight_method: str = "pow", weight_pow: float = 2.0, seed: int | None = None
) -> DataProto:
    """Draws as many rows as there are, with replacement, by the scores of their episodes.

    Args:
        data: has token_level_scores and response_mask, (batch, response_len) each.
        reweight_method, weight_pow, seed: as of `draw_rows_by_score`.
    Returns: the rows that were drawn, in the order in which they were.
    Raises:
        ValueError: the method is unknown.
    """
    episodes = EpisodeRows(data)
    drawable = real_rows(data) & data.batch["response_mask"].bool().any(1)  # (batch,)
    episode_scores = episodes.totals(data.batch["token_level_scores"])
    scores = episodes.of_rows(episode_scores.float().double())  # (batch,)
    rows = draw_rows_by_score(scores, drawable, reweight_method, weight_pow, seed)
    return data.select_idxs(rows)
