"""Policy filtration (PF-PPO, arXiv:2409.06957): responses whose reward is sure are trained on more often.

Invariant: the number of rows stays, and a batch's parts stay as large as they were.
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
        data: has token_level_scores (B, R). Neither dummy rows nor rows without a sampled token are drawn.
        reweight_method: pow: |score|^weight_pow; max_min: the best and the worst alone; max_random: the best four times
            as often as others.
        seed: of the draws; None: torch's generator draws.
    """
    episodes, real = EpisodeRows(data), real_rows(data) & data.batch["response_mask"].bool().any(1)
    scores = episodes.of_rows(episodes.totals(data.batch["token_level_scores"]).float().double())
    best, worst = scores == scores[real].max(), scores == scores[real].min()
    kinds = {"pow": scores.abs() ** weight_pow, "max_min": best | worst, "max_random": torch.where(best, 0.4, 0.1)}
    weights = torch.where(real, registered(kinds, "reweight_method", reweight_method).double() + 1e-8, 0)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return data.select_idxs(torch.multinomial(weights, len(data), replacement=True, generator=generator))
