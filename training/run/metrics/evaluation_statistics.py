"""Estimates what a model does over all tasks of a kind, from the samples of some tasks.

    rewards (tasks, n)  ->  a number for each task  ->  their mean, with an interval

Invariant: a task's n samples stay together. Every estimate is a mean over tasks, and its interval
comes from drawing whole tasks again, since samples of one task resemble each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist

import numpy as np

# The share of repetitions in which an interval is to hold the true value.
LEVEL = 0.95
# Times that the tasks are drawn again, and task numbers that are drawn at a time.
DRAWS = 10_000
DRAWN_AT_ONCE = 2_000_000
# Subsets of a task's samples that vote; where there are more, so many are drawn.
MOST_SUBSETS = 2_000
# With fewer tasks, differences of one sign come by chance in more than 1 of 20 cases: 2 / 2^5.
FEWEST_TASKS_FOR_A_DIFFERENCE = 6
# With fewer tasks' worth of either end of the range, drawing tasks again hides what is rare.
MOST_RARE = 10
# Halvings that find a quantile, and terms of a continued fraction: both to the last bits.
BISECTIONS = 50
TERMS = 200
# Rewards are float32 sums, which may miss 1 by their last bit.
TOLERANCE = 1e-6
# The range of values that show none.
UNKNOWN = (-math.inf, math.inf)


@dataclass(frozen=True)
class Estimate:
    """Holds a mean over tasks, and the interval of LEVEL around it.

    Attributes:
        low, high: None where nothing tells how far other tasks may be off: there is one task, or
            all got the same and the values have no known range.
        tasks: how many it is a mean of.
        approximate: the values have no known range, so that few tasks may hide what is rare.
    """

    value: float
    low: float | None
    high: float | None
    tasks: int
    approximate: bool = False


def reward_bounds(rewards: np.ndarray) -> tuple[float, float]:
    """Returns between which values rewards lie, as far as the samples (any shape) show it.

    0 and 1 where all lie there; -1 and 1 where all lie there and one is below 0; else UNKNOWN.
    Samples show it, not the means of tasks: that of 1 and -1 is 0.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if not rewards.size or not np.isfinite(rewards).all():
        return UNKNOWN
    least = float(rewards.min())
    if rewards.max() > 1 + TOLERANCE or least < -1 - TOLERANCE:
        return UNKNOWN
    return (-1.0, 1.0) if least < -TOLERANCE else (0.0, 1.0)


def estimate(
    task_values: np.ndarray, seed: int = 42, bounds: tuple[float, float] | None = None
) -> Estimate:
    """Averages one value a task, (tasks,), with its interval.

    Args:
        bounds: between which all values lie, as `reward_bounds` tells of the samples; None: those
            of the values themselves. With UNKNOWN the interval is the bootstrap's, and approximate.
    Few tasks of one kind, such as ten of which nine are solved, say nothing of how bad the others
    are. So where either end of the range has fewer than MOST_RARE tasks' worth, the interval is
    the one of as many trials (`trials_interval`), which is wider than the bootstrap's.
    """
    values = np.asarray(task_values, dtype=np.float64)
    tasks = len(values)
    mean = float(np.mean(values))
    if tasks < 2:
        return Estimate(mean, None, None, tasks)
    least, most = reward_bounds(values) if bounds is None else bounds
    if (least, most) == UNKNOWN:
        return bootstrap_estimate(values, seed)
    share = min(max((mean - least) / (most - least), 0.0), 1.0)
    if not are_alike(values) and tasks * min(share, 1 - share) >= MOST_RARE:
        low, high = bootstrap_interval(values, seed) or (least, most)
        return Estimate(mean, low, high, tasks)
    low, high = trials_interval(share, tasks)
    return Estimate(mean, least + low * (most - least), least + high * (most - least), tasks)


def are_alike(values: np.ndarray) -> bool:
    """Tells whether values are equal but for what rounding makes of them."""
    return bool(np.ptp(values) <= TOLERANCE * max(1.0, np.abs(values).max()))


def bootstrap_estimate(task_values: np.ndarray, seed: int = 42) -> Estimate:
    """Averages one value a task, of any range, with its bootstrap interval.

    Equal values have none: drawing them again would give one without width, as if it were sure
    that no other task gets another.
    """
    values = np.asarray(task_values, dtype=np.float64)
    low, high = (None, None)
    if not are_alike(values):
        low, high = bootstrap_interval(values, seed) or (None, None)
    return Estimate(float(np.mean(values)), low, high, len(values), approximate=True)


def estimate_share(task_shares: np.ndarray, seed: int = 42) -> Estimate:
    """Averages one share a task, (tasks,) in [0, 1], with its interval."""
    return estimate(task_shares, seed, bounds=(0.0, 1.0))


def trials_interval(share: float, tasks: int) -> tuple[float, float]:
    """Returns the exact interval of a share of so many trials (Clopper and Pearson).

    Tasks with values between 0 and 1 count in part, which makes it wider than it need be: no
    values in that range spread more than those of trials. Where all tasks got the same end, it
    reaches 1 - 0.025^(1 / tasks) from there: 0.31 with ten tasks.
    """
    tail = (1 - LEVEL) / 2
    # Sums of float32 may miss a whole number by a little.
    passed = round(share * tasks, 6)
    low = 0.0
    if passed > 0:
        low = beta_quantile(tail, passed, tasks - passed + 1)
    high = 1.0
    if passed < tasks:
        high = beta_quantile(1 - tail, passed + 1, tasks - passed)
    return low, high


def beta_quantile(share: float, a: float, b: float) -> float:
    """Returns below which point the beta distribution with a and b has a share of its mass."""
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if beta_share(a, b, middle) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def beta_share(a: float, b: float, x: float) -> float:
    """Returns the beta distribution's mass below x, I_x(a, b).

    By its continued fraction (Abramowitz and Stegun 26.5.8), evaluated from its end; the fraction
    converges fast below the mean, above it the mirrored one is taken.
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - beta_share(b, a, 1 - x)
    fraction = 1.0
    for m in range(TERMS, 0, -1):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m - 1) * (a + b + m - 1) * x / ((a + 2 * m - 2) * (a + 2 * m - 1))
        fraction = 1 + odd / (1 + even / fraction)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    log_front += a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / (a * fraction)


def bootstrap_interval(task_values: np.ndarray, seed: int = 42) -> tuple[float, float] | None:
    """Returns the interval of a mean by drawing tasks with replacement; None for fewer than two.

    It is the percentile interval with its two ends moved out, as Student's t does for few tasks
    (the "expanded percentile interval", arXiv:1411.5279): without that it holds the true mean too
    rarely, by ten tasks in 90 of 100 cases in place of 95.
    """
    tasks = len(task_values)
    if tasks < 2:
        return None
    values = np.asarray(task_values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    at_once = max(1, DRAWN_AT_ONCE // tasks)
    means = []
    for first in range(0, DRAWS, at_once):
        drawn = generator.integers(tasks, size=(min(at_once, DRAWS - first), tasks))
        means.append(values[drawn].mean(axis=1))
    tail = expanded_tail(tasks)
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)


def expanded_tail(tasks: int) -> float:
    """Returns the share of bootstrap means that lies beyond each end of an interval."""
    wider = math.sqrt(tasks / (tasks - 1)) * student_quantile(tasks - 1)
    return NormalDist().cdf(-wider)


def student_quantile(degrees: int) -> float:
    """Returns the upper (1 + LEVEL) / 2 quantile of Student's t.

    By its expansion in 1 / degrees (Abramowitz and Stegun 26.7.5); for one and two degrees, where
    that is too small, the ends of an interval are the least and the largest bootstrap mean anyway.
    """
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def subset_sizes(n: int) -> list[int]:
    """Lists 1, 2, 4, 8, ... below n, and n itself."""
    sizes = [1]
    while sizes[-1] * 2 < n:
        sizes.append(sizes[-1] * 2)
    return sizes if n == 1 else [*sizes, n]


def passes(values: np.ndarray, at_least: float) -> np.ndarray:
    """Tells of each value whether it passes; what is no number does not."""
    return values >= at_least - TOLERANCE


def pass_at_k(passed: np.ndarray, k: int) -> np.ndarray:
    """Estimates for each task how often at least one of k samples passes, without bias.

    1 - C(n - c, k) / C(n, k), with c of n samples that passed (arXiv:2107.03374, equation 1).

    Args:
        passed: (tasks, n) of truth values; k is at most n.
    Returns:
        (tasks,) float64.
    """
    n = passed.shape[1]
    of_successes = [1 - math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)]
    return np.array(of_successes)[passed.sum(axis=1)]


def majority_at_k(votes: list[list[str]], values: np.ndarray, k: int, seed: int = 42) -> np.ndarray:
    """Estimates for each task what the most frequent vote among k samples gets.

    The mean over all subsets of k of the n samples; where there are more than MOST_SUBSETS, over so
    many that are drawn. Answers that are equally frequent count by halves, thirds and so on.

    Args:
        votes, values: (tasks, n): what a sample answers, and what that answer gets.
    Returns:
        (tasks,) float64.
    """
    subsets = _subsets(values.shape[1], k, seed)
    estimates = []
    for task_votes, task_values in zip(votes, values, strict=True):
        estimates.append(_majority_of_task(task_votes, task_values, subsets))
    return np.array(estimates)


def _subsets(n: int, k: int, seed: int) -> np.ndarray:
    """Lists subsets of k of n numbers, (subsets, k): all, or MOST_SUBSETS at random."""
    if math.comb(n, k) <= MOST_SUBSETS:
        return np.array(list(combinations(range(n), k)))
    generator = np.random.default_rng(seed)
    order = generator.random((MOST_SUBSETS, n)).argsort(axis=1)
    return order[:, :k]


def _majority_of_task(votes: list[str], values: np.ndarray, subsets: np.ndarray) -> float:
    """Averages what the winner of each subset (subsets, k) of a task's samples gets."""
    answers, answer_of_sample = np.unique(np.array(votes), return_inverse=True)
    of_answer = answer_of_sample[None, :] == np.arange(len(answers))[:, None]  # (answers, n)
    value_of_answer = (of_answer * values).sum(axis=1) / of_answer.sum(axis=1)
    counts = of_answer.T[subsets].sum(axis=1)  # (subsets, answers)
    wins = counts == counts.max(axis=1, keepdims=True)
    gets = (wins * value_of_answer).sum(axis=1) / wins.sum(axis=1)
    return float(gets.mean())


def spread_over_tasks(rewards: np.ndarray) -> float | None:
    """Returns the standard deviation of the tasks' mean rewards; None of one task."""
    if len(rewards) < 2:
        return None
    return float(rewards.mean(axis=1).std(ddof=1))


def spread_over_samples(rewards: np.ndarray) -> float | None:
    """Returns the standard deviation within a task, averaged over tasks; None of one sample.

    It divides by n, as validation's std@N does.
    """
    if rewards.shape[1] < 2:
        return None
    return float(rewards.std(axis=1).mean())


def paired_difference(
    first: np.ndarray,
    second: np.ndarray,
    seed: int = 42,
    bounds: tuple[float, float] | None = None,
) -> Estimate:
    """Estimates how much better the first model is, from both models' values (tasks,).

    The tasks are the same, so that what makes one hard is taken off: tasks are drawn with both
    their values. Where all differences are alike, that draw shows nothing: up to a share of
    1 - 0.025^(1 / tasks) of all tasks may then be otherwise, as far apart as the range allows.

    Args:
        bounds: between which both models' values lie; None: those of the values themselves.
    """
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    least, most = reward_bounds(np.concatenate([first, second])) if bounds is None else bounds
    tasks = len(differences)
    if tasks < 2 or (least, most) == UNKNOWN or not are_alike(differences):
        return bootstrap_estimate(differences, seed)
    mean = float(np.mean(differences))
    _, otherwise = trials_interval(0.0, tasks)
    farthest = most - least
    low = mean - otherwise * (farthest + mean)
    high = mean + otherwise * (farthest - mean)
    return Estimate(mean, low, high, tasks)


def is_shown(difference: Estimate) -> bool:
    """Tells whether a difference is more than so many tasks could show by chance."""
    if difference.low is None or difference.high is None:
        return False
    excludes_zero = difference.low > 0 or difference.high < 0
    return excludes_zero and difference.tasks >= FEWEST_TASKS_FOR_A_DIFFERENCE
