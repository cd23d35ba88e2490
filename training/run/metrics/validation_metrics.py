"""Computes validation's metrics: several samples of each prompt, by data source.

mean@N and std@N, best and worst of k draws (exact), and majority votes (by resampling).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from training.batch.row_groups import rows_by_key
from training.run.metrics.evaluation_statistics import estimate, reward_bounds

Reduction = Callable[[list[Any]], float]
# {source: {variable: {metric: value}}}
NestedMetrics = dict[str, dict[str, dict[str, float]]]


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[Reduction],
    n_bootstrap: int = 1000,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """Estimates (mean, std) of each function over `n_bootstrap` subsets, drawn with replacement."""
    generator = np.random.default_rng(seed)
    draws = generator.integers(len(data), size=(n_bootstrap, subset_size))
    subsets = [[data[i] for i in draw] for draw in draws.tolist()]
    estimates = []
    for reduce_fn in reduce_fns:
        results = np.array([reduce_fn(subset) for subset in subsets], dtype=np.float64)
        estimates.append((float(results.mean()), float(results.std())))
    return estimates


def calc_maj_val(data: Sequence[Any], vote_key: Any, val_key: Any) -> float:
    """Returns the value of the most frequent vote; the earliest of equally frequent ones."""
    votes = Counter(item[vote_key] for item in data)
    [(winner, _)] = votes.most_common(1)
    return next(item[val_key] for item in data if item[vote_key] == winner)


def process_validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    infos_dict: Mapping[str, Sequence[Any]],
    seed: int = 42,
) -> NestedMetrics:
    """Averages each variable of a data source over the N samples of a prompt, then over prompts.

    Args:
        data_sources, sample_uids: of each sample; samples of one prompt share their uid.
        infos_dict: variable -> one entry per sample, None where it has none. In each source a
            variable counts if all its samples have a number (sources may be scored by different
            rules); text is left out, but `pred` is what majority votes are about, None being a
            vote too unless the whole source has no other.
        seed: of the resampling behind maj@k.
    Returns:
        {source: {variable: {metric: value}}} with mean@N, and for N > 1: std@N and, for
        k = 2, 4, ... N, {best,worst}@k/{mean,std} (exact, over k draws with replacement) and
        maj@k/{mean,std} (1,000 resamples) where there is a `pred`.
    Raises:
        ValueError: a variable does not have one entry per sample.
    """
    num_samples = len(data_sources)
    _require_one_entry_each(infos_dict, num_samples)
    # Prompts of a source with the same number of samples make one array.
    prompts_of_shape: dict[tuple[str, int], list[list[int]]] = defaultdict(list)
    rows_of_source: dict[str, list[int]] = defaultdict(list)
    prompts = rows_by_key(zip(data_sources, sample_uids, strict=True))
    for (source, _), rows in prompts.items():
        prompts_of_shape[source, len(rows)].append(rows)
        rows_of_source[source] += rows
    preds: Sequence[Any] = infos_dict.get("pred", [None] * num_samples)
    result: NestedMetrics = defaultdict(lambda: defaultdict(dict))
    for (source, n), prompt_rows in prompts_of_shape.items():
        votes = [[str(preds[row]) for row in rows] for rows in prompt_rows]
        has_votes = n > 1 and any(preds[row] is not None for row in rows_of_source[source])
        for name, values in infos_dict.items():
            numbers = np.array([_as_number(value) for value in values])
            if any(number is None for number in numbers[rows_of_source[source]]):
                continue
            samples = numbers[np.array(prompt_rows)].astype(np.float64)  # (prompts, N)
            result[source][name].update(_sample_metrics(samples))
            if has_votes:
                result[source][name].update(_majority_metrics(samples, votes, seed))
    return {source: dict(variables) for source, variables in result.items()}


def _require_one_entry_each(infos: Mapping[str, Sequence[Any]], num_samples: int) -> None:
    wrong = {name: len(values) for name, values in infos.items() if len(values) != num_samples}
    if wrong:
        raise ValueError(
            f"infos_dict has variables whose number of entries is not {num_samples}, that of the "
            f"samples: {wrong}. Put None where a sample has no value"
        )


def _as_number(value: Any) -> float | None:
    """Makes a float; None of what is no number, or an int beyond the largest float."""
    if not isinstance(value, int | float | np.integer | np.floating | np.bool_):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _subset_sizes(n: int) -> list[int]:
    """Lists 2, 4, 8, ... below n, and n itself."""
    sizes = []
    size = 2
    while size < n:
        sizes.append(size)
        size *= 2
    return [*sizes, n]


def _sample_metrics(samples: np.ndarray) -> dict[str, float]:
    """Computes mean@N, std@N and best and worst of k draws of samples (prompts, N)."""
    n = samples.shape[1]
    metrics = {f"mean@{n}": float(samples.mean())}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = float(samples.std(axis=1).mean())
    ascending = np.sort(samples, axis=1)
    for k in _subset_sizes(n):
        # The largest of k draws with replacement is at most the i-th smallest with probability
        # (i/n)^k.
        weights_of_largest = np.diff((np.arange(n + 1) / n) ** k)
        metrics.update(_weighted_metrics(f"best@{k}", ascending, weights_of_largest))
        metrics.update(_weighted_metrics(f"worst@{k}", ascending, weights_of_largest[::-1]))
    return metrics


def _weighted_metrics(name: str, ascending: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    """Computes mean and deviation of samples (prompts, N) under weights (N,), over prompts."""
    mean = ascending @ weights  # (prompts,)
    variance = np.maximum(ascending**2 @ weights - mean**2, 0)
    return {
        f"{name}/mean": float(mean.mean()),
        f"{name}/std": float(np.sqrt(variance).mean()),
    }


def _majority_metrics(
    samples: np.ndarray, votes: Sequence[Sequence[Any]], seed: int
) -> dict[str, float]:
    """Computes maj@k of samples (prompts, N) with their votes, by resampling."""

    def majority(ballots: Sequence[Any]) -> float:
        return calc_maj_val(ballots, vote_key=0, val_key=1)

    ballots_of_prompts = []
    for prompt_votes, values in zip(votes, samples.tolist(), strict=True):
        ballots_of_prompts.append(list(zip(prompt_votes, values, strict=True)))
    metrics: dict[str, float] = {}
    for k in _subset_sizes(samples.shape[1]):
        per_prompt = []
        for ballots in ballots_of_prompts:
            [estimate] = bootstrap_metric(ballots, k, [majority], seed=seed)
            per_prompt.append(estimate)
        mean, std = np.mean(per_prompt, axis=0)
        metrics[f"maj@{k}/mean"] = float(mean)
        metrics[f"maj@{k}/std"] = float(std)
    return metrics


def flatten_validation_metrics(
    nested: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> dict[str, float]:
    """Names each value of {source: {variable: {metric: value}}} by the path to it.

    Returns:
        val-core/SOURCE/VARIABLE/METRIC for the reward, val-aux/SOURCE/VARIABLE/METRIC for the rest.
    """
    flat = {}
    for source, variables in nested.items():
        for variable, metrics in variables.items():
            section = "val-core" if variable == "reward" else "val-aux"
            for metric, value in metrics.items():
                flat[f"{section}/{source}/{variable}/{metric}"] = value
    return flat


def reward_intervals(
    sources: Sequence[str], uids: Sequence[str], rewards: Sequence[float]
) -> dict[str, float]:
    """Tells how sure each source's mean reward is, by drawing its tasks again.

    Returns:
        val-core/SOURCE/reward/mean@N/ci_low, /ci_high (none for a single task, nor for equal
        rewards of no known range) and /tasks.
    """
    metrics: dict[str, float] = {}
    for (source, n), tasks in rows_by_task(sources, uids).items():
        samples = np.array(rewards, dtype=np.float64)[tasks]  # (tasks, n)
        mean = estimate(samples.mean(axis=1), bounds=reward_bounds(samples))
        name = f"val-core/{source}/reward/mean@{n}"
        if mean.low is not None and mean.high is not None:
            metrics[f"{name}/ci_low"] = mean.low
            metrics[f"{name}/ci_high"] = mean.high
        metrics[f"{name}/tasks"] = float(mean.tasks)
    return metrics


def rows_by_task(sources: Sequence[str], uids: Sequence[str]) -> dict[tuple[str, int], np.ndarray]:
    """Sorts the samples' numbers by source and task: (source, n) -> (tasks, n), in their order."""
    tasks: dict[tuple[str, int], list[list[int]]] = defaultdict(list)
    for (source, _), rows in rows_by_key(zip(sources, uids, strict=True)).items():
        tasks[source, len(rows)].append(rows)
    return {key: np.array(rows) for key, rows in tasks.items()}
