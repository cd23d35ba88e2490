"""Computes the metrics of a step's batch under verl's names.

Invariant: averages are per episode, not per row. An episode may own several rows (they share an
`episode_id`): it counts once, with the sum of its rows' scores and tokens. Dummy rows, which only
pad a batch to the ranks, never count.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.array_ops import row_blocks, row_sums
from data.protocol import DataProto
from training.batch.episode_rows import EpisodeRows, real_rows
from training.run.metrics.group_metrics import compute_group_metrics

# Sections of a step whose time is put down to every token of the batch; generation's goes to the
# response's tokens.
SECTIONS_OVER_ALL_TOKENS = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Reduces each metric to a float.

    It takes the largest if the metric's name has the word max, the smallest for min, else the mean.

    Args:
        metrics: name -> a number, an array or tensor of any shape, or a list of numbers and 0-dim
            tensors.
    """
    reduced = {}
    for name, values in metrics.items():
        words = re.split(r"[^a-z]+", name.lower())
        numbers = torch.as_tensor(values, dtype=torch.float64)
        if "max" in words:
            reduced[name] = numbers.max().item()
        elif "min" in words:
            reduced[name] = numbers.min().item()
        else:
            reduced[name] = numbers.mean().item()
    return reduced


@dataclass(frozen=True)
class Moments:
    """Holds mean, largest, smallest and variance of some numbers, 0-dim float64 each."""

    mean: Tensor
    max: Tensor
    min: Tensor
    variance: Tensor

    def metrics(self, name: str) -> dict[str, float]:
        """Returns NAME/mean, NAME/max, NAME/min."""
        return {
            f"{name}/mean": self.mean.item(),
            f"{name}/max": self.max.item(),
            f"{name}/min": self.min.item(),
        }


def compute_moments(
    values: Tensor, mask: Tensor | None = None, less: Tensor | float = 0.0
) -> Moments | None:
    """Computes moments of values - less over the mask, in float64, a block of rows at a time.

    Returns None where there are no values, or none in the mask; a mask of None takes all.
    """
    less = torch.as_tensor(less).expand_as(values)
    if mask is None:
        mask = torch.ones_like(values, dtype=torch.bool)
    blocks: list[list[float]] = []
    for rows in row_blocks(values):
        differences = values[rows].double() - less[rows].double()
        # numpy chooses by a mask thirty times as fast.
        chosen = torch.from_numpy(differences.numpy()[mask[rows].numpy()])
        if chosen.numel() > 0:
            # As numbers: small tensors between the blocks would keep the heap from shrinking.
            blocks.append(
                [
                    chosen.numel(),
                    chosen.mean().item(),
                    chosen.max().item(),
                    chosen.min().item(),
                    chosen.var(correction=0).item(),
                ]
            )
    if not blocks:
        return None
    counts, means, highest, lowest, variances = torch.tensor(blocks, dtype=torch.float64).T
    share = counts / counts.sum()
    mean = (share * means).sum()
    variance = (share * (variances + (means - mean) ** 2)).sum()
    return Moments(mean=mean, max=highest.max(), min=lowest.min(), variance=variance)


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, float]:
    """Summarises a batch: scores and lengths per episode, advantages and values per sampled token.

    Args:
        batch: with token_level_scores, token_level_rewards, advantages, returns, response_mask
            (batch, response_len), with `use_critic` values, attention_mask (batch, prompt_len +
            response_len); uid, episode_id where known.
    Returns:
        critic/{score,rewards,advantages,returns,values}/{mean,max,min}, critic/vf_explained_var,
        {response,prompt}_length/{mean,max,min,clip_ratio} in tokens, environment tokens included
        (an episode's prompt is its rows' shortest), response/aborted_ratio (episodes without a
        sampled token, such as masked ones, which scores and rewards leave out).
    """
    fields = batch.batch
    episodes = EpisodeRows(batch)
    mask = fields["response_mask"].bool()  # (batch, response_len)
    response_width = mask.shape[-1]
    attended = fields["attention_mask"].bool()
    in_prompt = attended[:, :-response_width]
    in_response = attended[:, -response_width:]
    is_live = episodes.fold(mask.any(-1), "amax") > 0

    moments = {
        "critic/score": compute_moments(
            episodes.fold(fields["token_level_scores"].sum(-1))[is_live]
        ),
        "critic/rewards": compute_moments(
            episodes.fold(fields["token_level_rewards"].sum(-1))[is_live]
        ),
        "critic/advantages": compute_moments(fields["advantages"], mask),
        "critic/returns": compute_moments(fields["returns"], mask),
    }
    if use_critic:
        moments["critic/values"] = compute_moments(fields["values"], mask)
    moments["response_length"] = compute_moments(episodes.fold(row_sums(in_response)))
    moments["prompt_length"] = compute_moments(episodes.fold(row_sums(in_prompt), "amin"))

    metrics: dict[str, float] = {}
    for name, values in moments.items():
        if values is not None:
            metrics.update(values.metrics(name))
    if real_rows(batch).any():
        is_full = episodes.fold(in_response.all(-1), "amax")
        metrics["response_length/clip_ratio"] = is_full.mean().item()
        is_full = episodes.fold(in_prompt.all(-1), "amax")
        metrics["prompt_length/clip_ratio"] = is_full.mean().item()
        metrics["response/aborted_ratio"] = (1 - is_live.double().mean()).item()
    returns = moments["critic/returns"]
    if use_critic and returns is not None:
        errors = compute_moments(fields["returns"], mask, less=fields["values"])
        assert errors is not None
        unexplained = errors.variance / (returns.variance + 1e-5)
        metrics["critic/vf_explained_var"] = (1 - unexplained).item()
    return metrics


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """Reports the seconds of every section, and milliseconds per token where it works on tokens.

    Args:
        timing_raw: section -> seconds.
    Returns:
        timing_s/NAME, and timing_per_token_ms/NAME for the sections that work on tokens.
    """
    response_width = batch.batch["response_mask"].shape[-1]
    attended = batch.batch["attention_mask"]
    is_real = real_rows(batch)
    all_tokens = int(row_sums(attended)[is_real].sum())
    response_tokens = int(row_sums(attended[:, -response_width:])[is_real].sum())
    tokens = dict.fromkeys(SECTIONS_OVER_ALL_TOKENS, all_tokens)
    tokens["gen"] = response_tokens
    metrics = {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
    for name, seconds in timing_raw.items():
        if tokens.get(name):
            metrics[f"timing_per_token_ms/{name}"] = seconds * 1000 / tokens[name]
    return metrics


def compute_step_metrics(
    batch: DataProto,
    timing_raw: Mapping[str, float],
    ranks: int,
    textless_ids: Sequence[int],
) -> dict[str, float]:
    """Measures a step: its data, where its time went, and its throughput on so many ranks.

    Args:
        textless_ids: ids of the tokens that are no text, as the end of a turn.
    """
    return {
        **compute_data_metrics(batch, use_critic="values" in batch.batch),
        **compute_group_metrics(batch, textless_ids),
        **compute_timing_metrics(batch, timing_raw),
        **compute_throughout_metrics(batch, timing_raw, ranks),
    }


def compute_throughout_metrics(
    batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int
) -> dict[str, float]:
    """Measures the step's throughput; needs its seconds as timing_raw["step"].

    Returns:
        perf/total_num_tokens, perf/time_per_step (s), perf/throughput (tokens/s per GPU).
    """
    tokens = int(row_sums(batch.batch["attention_mask"])[real_rows(batch)].sum())
    seconds = timing_raw["step"]
    return {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / (seconds * n_gpus),
    }
