"""Policy filtration: trains more often on responses whose reward is sure.

PF-PPO (arXiv:2409.06957). Invariant: the batch that is drawn from stays as it is; neither dummy
rows nor rows without a sampled token are drawn.
"""

import torch

from data.names import registered
from data.protocol import DataProto
from training.batch.episode_rows import EpisodeRows, real_rows


def compute_pf_ppo_reweight_data(
    data: DataProto, reweight_method: str = "pow", weight_pow: float = 2.0, seed: int | None = None
) -> DataProto:
    """Draws as many rows as there are, with replacement, by the scores of their episodes.

    Args:
        data: has token_level_scores and response_mask, (batch, response_len) each.
        reweight_method: pow: |score|^weight_pow; max_min: the best and the worst alone; max_random:
            the best four times as often as others.
        weight_pow: the power, of pow.
        seed: of the draws; None: torch's generator draws.
    Returns: the rows that were drawn, in the order in which they were.
    Raises:
        ValueError: the method is unknown.
    """
    episodes = EpisodeRows(data)
    drawable = real_rows(data) & data.batch["response_mask"].bool().any(1)  # (batch,)
    episode_scores = episodes.totals(data.batch["token_level_scores"])
    scores = episodes.of_rows(episode_scores.float().double())  # (batch,)
    is_best = scores == scores[drawable].max()
    is_worst = scores == scores[drawable].min()
    weights_by_method = {
        "pow": scores.abs() ** weight_pow,
        "max_min": is_best | is_worst,
        "max_random": torch.where(is_best, 0.4, 0.1),
    }
    weights = registered(weights_by_method, "reweight_method", reweight_method)
    # A little above 0, so that there is always something to draw.
    weights = torch.where(drawable, weights.double() + 1e-8, 0)
    generator = None
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
    rows = torch.multinomial(weights, len(data), replacement=True, generator=generator)
    return data.select_idxs(rows)
