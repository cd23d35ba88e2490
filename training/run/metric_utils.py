"""Metrics of a step and of validation, under verl's names.

Invariant: averages are per episode, not per row. An episode may own several rows (they share an `episode_id`): it
counts once, with the sum of its rows' scores and tokens. Dummy rows, which only pad a batch to the ranks, never count.
"""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.containers import row_blocks, row_sums
from data.protocol import DataProto
from data.texts import say
from training.batch.batching import EpisodeRows, real_rows, rows_by_key

Reduction = Callable[[list[Any]], float]
# Sections of a step whose time is put down to every token of the batch; generation's goes to the response's tokens.
_SECTIONS_OVER_ALL_TOKENS = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Reduces each metric to a float: the largest if its name has the word max, the smallest for min, else the mean.

    Args:
        metrics: name -> a number, a tensor of any shape, or a list of numbers and 0-dim tensors.
    Tensors are reduced where they are: one synchronisation per metric.
    Raises: ValueError for an empty list.
    """
    return {name: _reduced(name, values).item() for name, values in metrics.items()}


def _reduced(name: str, values: Any) -> Tensor:
    if isinstance(values, list | tuple):
        if not values:
            raise ValueError(f"metric '{name}' is an empty list: there is nothing to reduce")
        device = next((value.device for value in values if isinstance(value, Tensor)), None)
        values = torch.stack([torch.as_tensor(value, device=device).detach().double() for value in values])
    numbers = torch.as_tensor(values).detach().double()
    words = re.split(r"[^a-z]+", name.lower())
    return numbers.max() if "max" in words else numbers.min() if "min" in words else numbers.mean()


def _moments(values: Tensor, mask: Tensor | None = None, less: Tensor | float = 0.0) -> dict[str, Tensor]:
    """Computes mean, max, min and var of values - less over the mask, in float64, a block of rows at a time.

    Nothing where there are no values, or none in the mask; None takes all.
    """
    parts: list[list[float]] = []
    less = torch.as_tensor(less).expand_as(values)
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    for rows in row_blocks(values):
        # numpy chooses by a mask thirty times as fast.
        part = torch.from_numpy((values[rows].double() - less[rows].double()).numpy()[mask[rows].numpy()])
        if count := part.numel():
            found = (part.mean(), part.max(), part.min(), part.var(correction=0))
            # As numbers: small tensors between the blocks would keep the heap from shrinking.
            parts.append([count, *(scalar.item() for scalar in found)])
    if not parts:
        return {}
    counts, means, highest, lowest, variances = torch.tensor(parts, dtype=torch.float64).T
    share = counts / counts.sum()
    mean = (share * means).sum()
    variance = (share * (variances + (means - mean) ** 2)).sum()
    return {"mean": mean, "max": highest.max(), "min": lowest.min(), "var": variance}


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, float]:
    """Summarises scores, rewards and lengths per episode, and advantages, returns and values per sampled token.

    Args:
        batch: with token_level_scores, token_level_rewards, advantages, returns, response_mask (batch, response_len),
            with `use_critic` values, attention_mask (batch, prompt_len + response_len); uid, episode_id where known.
    Returns:
        critic/{score,rewards,advantages,returns,values}/{mean,max,min}, critic/vf_explained_var,
        {response,prompt}_length/{mean,max,min,clip_ratio} in tokens, environment tokens included (an episode's
        prompt is its rows' shortest), response/aborted_ratio (episodes without a sampled token, such as masked ones,
        which scores and rewards leave out).
    """
    tensors, episodes = batch.batch, EpisodeRows(batch)
    mask = tensors["response_mask"].bool()  # (batch, response_len)
    prompt_width = tensors["attention_mask"].shape[-1] - mask.shape[-1]
    prompts, responses = tensors["attention_mask"].bool().split([prompt_width, mask.shape[-1]], dim=-1)
    live = episodes.fold(mask.any(-1), "amax") > 0
    scores, rewards = (episodes.fold(tensors[f"token_level_{name}"].sum(-1))[live] for name in ("scores", "rewards"))
    names = ("advantages", "returns", *(["values"] if use_critic else []))
    tokens = {f"critic/{name}": _moments(tensors[name], mask) for name in names}
    found = {"critic/score": _moments(scores), "critic/rewards": _moments(rewards), **tokens}
    found["response_length"] = _moments(episodes.fold(row_sums(responses)))
    found["prompt_length"] = _moments(episodes.fold(row_sums(prompts), "amin"))
    metrics = {f"{name}/{kind}": x for name, own in found.items() for kind, x in own.items() if kind != "var"}
    if real_rows(batch).any():
        metrics["response_length/clip_ratio"] = episodes.fold(responses.all(-1), "amax").mean()
        metrics["prompt_length/clip_ratio"] = episodes.fold(prompts.all(-1), "amax").mean()
        metrics["response/aborted_ratio"] = 1 - live.double().mean()
    if use_critic and mask.any():
        error = _moments(tensors["returns"], mask, less=tensors["values"])
        metrics["critic/vf_explained_var"] = 1 - error["var"] / (tokens["critic/returns"]["var"] + 1e-5)
    return {name: value.item() for name, value in metrics.items()}


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """Reports the seconds of every section, and the milliseconds per token of those that work on tokens.

    Args:
        timing_raw: section -> seconds.
    Returns: timing_s/NAME, and timing_per_token_ms/NAME for the sections that work on tokens.
    """
    response_width = batch.batch["response_mask"].shape[-1]
    attended, real = batch.batch["attention_mask"], real_rows(batch)
    tokens = dict.fromkeys(_SECTIONS_OVER_ALL_TOKENS, int(row_sums(attended)[real].sum()))
    tokens["gen"] = int(row_sums(attended[:, -response_width:])[real].sum())
    metrics = {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
    timed = [name for name in timing_raw if tokens.get(name)]
    return metrics | {f"timing_per_token_ms/{name}": timing_raw[name] * 1000 / tokens[name] for name in timed}


def compute_throughout_metrics(batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """Measures the step's throughput; needs its seconds as timing_raw["step"].

    Returns: perf/total_num_tokens, perf/time_per_step (s), perf/throughput (tokens/s per GPU).
    """
    tokens, seconds = int(row_sums(batch.batch["attention_mask"])[real_rows(batch)].sum()), timing_raw["step"]
    rate = tokens / (seconds * n_gpus)
    return {"perf/total_num_tokens": tokens, "perf/time_per_step": seconds, "perf/throughput": rate}


# Validation: several samples per prompt


def bootstrap_metric(
    data: Sequence[Any], subset_size: int, reduce_fns: Sequence[Reduction], n_bootstrap: int = 1000, seed: int = 42
) -> list[tuple[float, float]]:
    """Estimates (mean, std) of each function over `n_bootstrap` subsets, drawn with replacement."""
    draws = np.random.default_rng(seed).integers(len(data), size=(n_bootstrap, subset_size))
    subsets = [[data[i] for i in draw] for draw in draws.tolist()]
    results = np.array([[fn(subset) for subset in subsets] for fn in reduce_fns], dtype=np.float64)
    return [(float(row.mean()), float(row.std())) for row in results]


def calc_maj_val(data: Sequence[Any], vote_key: Any, val_key: Any) -> float:
    """Returns the value of the most frequent vote; the earliest of equally frequent ones."""
    winner = Counter(item[vote_key] for item in data).most_common(1)[0][0]
    return next(item[val_key] for item in data if item[vote_key] == winner)


def process_validation_metrics(
    data_sources: Sequence[str], sample_uids: Sequence[str], infos_dict: Mapping[str, Sequence[Any]], seed: int = 42
) -> dict[str, dict[str, dict[str, float]]]:
    """Averages each variable of a data source over the N samples of a prompt, and then over prompts.

    Args:
        data_sources, sample_uids: of each sample; samples of one prompt share their uid.
        infos_dict: variable -> one entry per sample, None where it has none. In each source a variable counts if all
            its samples have a number (sources may be scored by different rules); text is left out, but `pred` is what
            majority votes are about, None being a vote too unless the whole source has no other.
        seed: of the resampling behind maj@k.
    Returns:
        {source: {variable: {metric: value}}} with mean@N, and for N > 1: std@N and, for k = 2, 4, ... N,
        {best,worst}@k/{mean,std} (exact, over k draws with replacement) and maj@k/{mean,std} (1,000 resamples) where
        there is a `pred`.
    Raises: ValueError for a variable that does not have one entry per sample.
    """
    if wrong := {name: len(values) for name, values in infos_dict.items() if len(values) != len(data_sources)}:
        raise ValueError(say("lengths_differ", samples=len(data_sources), wrong=wrong))
    same_shape: dict[tuple[str, int], list[list[int]]] = defaultdict(list)
    rows_of: dict[str, list[int]] = defaultdict(list)
    for (source, _), rows in rows_by_key(zip(data_sources, sample_uids, strict=True)).items():
        same_shape[source, len(rows)].append(rows)
        rows_of[source] += rows
    numbers = {name: np.array([_as_number(value) for value in values]) for name, values in infos_dict.items()}
    preds = infos_dict.get("pred", [None] * len(data_sources))
    result: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for (source, n), groups in same_shape.items():
        votes = [[_ballot(preds[row]) for row in rows] for rows in groups]
        voted = n > 1 and any(preds[row] is not None for row in rows_of[source])
        for name, values in numbers.items():
            if all(value is not None for value in values[rows_of[source]]):
                samples = values[np.array(groups)].astype(np.float64)  # (prompts, N)
                result[source][name] |= _sample_metrics(samples)
                if voted:
                    result[source][name] |= _majority_metrics(samples, votes, seed)
    return {source: dict(variables) for source, variables in result.items()}


def _as_number(value: Any) -> float | None:
    """Makes a float; None of what is no number, or an int beyond the largest float."""
    with suppress(OverflowError):
        if isinstance(value, int | float | np.integer | np.floating | np.bool_):
            return float(value)
    return None


def _ballot(pred: Any) -> Any:
    """Makes something that can be counted: lists and arrays have no hash, and NaN is not equal to itself."""
    plain = pred is None or isinstance(pred, str | int | float | np.number)
    return pred if plain and pred == pred else repr(pred)


def _subset_sizes(n: int) -> list[int]:
    """Lists 2, 4, 8, ... below n, and n itself."""
    return [2**i for i in range(1, n.bit_length()) if 2**i < n] + [n]


def _sample_metrics(samples: np.ndarray) -> dict[str, float]:
    n = samples.shape[1]
    metrics = {f"mean@{n}": float(samples.mean())}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = float(samples.std(axis=1).mean())
    ascending = np.sort(samples, axis=1)
    for k in _subset_sizes(n):
        # The largest of k draws with replacement is at most the i-th smallest with probability (i/n)^k.
        largest = np.diff((np.arange(n + 1) / n) ** k)
        for name, weights in (("best", largest), ("worst", largest[::-1])):
            mean = ascending @ weights  # (prompts,)
            variance = np.maximum(ascending**2 @ weights - mean**2, 0)
            metrics |= {f"{name}@{k}/mean": float(mean.mean()), f"{name}@{k}/std": float(np.sqrt(variance).mean())}
    return metrics


def _majority_metrics(samples: np.ndarray, votes: Sequence[Sequence[Any]], seed: int) -> dict[str, float]:
    majority = partial(calc_maj_val, vote_key=0, val_key=1)
    prompts = [list(zip(own, values, strict=True)) for own, values in zip(votes, samples.tolist(), strict=True)]
    metrics: dict[str, float] = {}
    for k in _subset_sizes(samples.shape[1]):
        per_prompt = [bootstrap_metric(ballots, k, [majority], seed=seed)[0] for ballots in prompts]
        mean, std = np.mean(per_prompt, axis=0)
        metrics |= {f"maj@{k}/mean": float(mean), f"maj@{k}/std": float(std)}
    return metrics


def flatten_validation_metrics(nested: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """Names each value of {source: {variable: {metric: value}}} by the path to it.

    Returns: val-core/SOURCE/VARIABLE/METRIC for the reward, val-aux/SOURCE/VARIABLE/METRIC for the rest.
    """
    return {
        f"{'val-core' if variable == 'reward' else 'val-aux'}/{source}/{variable}/{metric}": value
        for source, variables in nested.items()
        for variable, metrics in variables.items()
        for metric, value in metrics.items()
    }


class StepTimer:
    """Measures seconds per named section of a step: `with timer("gen"): ...`; a section that comes twice adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
