"""Policy filtration (PF-PPO, arXiv:2409.06957): responses whose reward is sure are trained on more often.

Invariant: the number of rows stays, and a batch's parts stay as large as they were.
"""

import torch
from torch import Tensor

from data.names import unknown_name
from data.protocol import DataProto
from training.batch.episode_rows import EpisodeRows, real_rows

METHODS = ("pow", "max_min", "max_random")


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
    scores = episodes.of_rows(episodes.join(data.batch["token_level_scores"]).sum(-1).double())
    weights = torch.where(real, _weights(scores, scores[real], reweight_method, weight_pow) + 1e-8, 0)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return data.select_idxs(torch.multinomial(weights, len(data), replacement=True, generator=generator))


def _weights(scores: Tensor, counted: Tensor, reweight_method: str, weight_pow: float) -> Tensor:
    if reweight_method == "pow":
        return scores.abs() ** weight_pow
    best = scores == counted.max()
    if reweight_method == "max_min":
        return (best | (scores == counted.min())).double()
    if reweight_method == "max_random":
        return torch.where(best, 0.4, 0.1).double()
    raise unknown_name("reweight_method", reweight_method, METHODS)
