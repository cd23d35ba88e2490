"""Sums up what was played in an evaluation: numbers for eval.json, a table and sentences to read.

Invariant: it computes from samples alone, so that the same samples give the same text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from custom.reward_managers.unscored import UNSCORED
from training.run.abort_policy import EnvironmentsFail
from training.run.metrics.evaluation_statistics import (
    FEWEST_TASKS_FOR_A_DIFFERENCE,
    Estimate,
    estimate,
    estimate_share,
    is_shown,
    majority_at_k,
    paired_difference,
    pass_at_k,
    passes,
    reward_bounds,
    spread_over_samples,
    spread_over_tasks,
    subset_sizes,
)
from training.run.metrics.validation_metrics import rows_by_task
from training.validation import ValidationSamples
from workers.rollout.episode import FAILURES

# The name of all data sources together; see `name_of_all` for a source of that name.
ALL = "all"
ALL_BUT_A_SOURCE = "all_sources"
# A number of its own that reward functions of verl's kind give: whether an answer is right.
ACCURACY = "acc"


@dataclass(frozen=True)
class Pairing:
    """Holds what tells whether two models got the same tasks.

    Attributes:
        tasks: data source and uid of each episode.
        begins: uid -> a digest of its first messages.
    """

    tasks: tuple[tuple[str, str], ...]
    begins: Mapping[str, str]


def summarise(
    samples: ValidationSamples, facts: Sequence[Mapping[str, Any]], pass_reward: float
) -> dict[str, Any]:
    """Computes all that eval.json says of the samples; `pass_reward` is what a pass is paid."""
    by_source = tasks_by_source(samples)
    passed = passed_samples(samples, pass_reward)
    sources = {source: source_summary(samples, rows, passed) for source, rows in by_source.items()}
    tasks = len(set(zip(samples.sources, samples.uids, strict=True)))
    failed = [fact for fact in facts if fact["ending"] in FAILURES]
    errors = [str(fact["error"]) for fact in facts if fact["error"]]
    return {
        "tasks": tasks,
        "episodes": len(samples.uids),
        "samples_per_task": len(samples.uids) // max(tasks, 1),
        "pass": pass_rule(samples, pass_reward),
        "sources": sources,
        "endings": dict(Counter(samples.endings).most_common()),
        "failed_episodes": len(failed),
        "unscored_episodes": sum(map(bool, samples.infos.get(UNSCORED, []))),
        "attempts_played_again": sum(fact["attempts"] - 1 for fact in facts),
        "first_error": errors[0].splitlines()[0] if errors else None,
        "by_task": [
            task_entries(samples, rows, passed)
            for source, rows_of_tasks in by_source.items()
            if source in samples.sources
            for rows in rows_of_tasks
        ],
    }


def tasks_by_source(samples: ValidationSamples) -> dict[str, np.ndarray]:
    """Sorts the samples' numbers by source and task, (tasks, n), with all of several sources.

    Raises:
        ValueError: tasks have different numbers of samples, so that some would be left out.
    """
    by_source: dict[str, np.ndarray] = {}
    numbers = set()
    for (source, n), tasks in rows_by_task(samples.sources, samples.uids).items():
        by_source[source] = tasks
        numbers.add(n)
    if len(numbers) > 1:
        raise ValueError(
            f"tasks have {' or '.join(map(str, sorted(numbers)))} samples; allowed: one number for "
            "all. A trainer of one's own must play each described episode, and no other"
        )
    if len(by_source) > 1:
        everything = np.concatenate(list(by_source.values()))
        # In the order in which they were played.
        by_source[name_of_all(by_source)] = everything[everything[:, 0].argsort()]
    return by_source


def name_of_all(sources: Collection[str]) -> str:
    """Names all data sources together as none of them is named."""
    if ALL not in sources:
        return ALL
    name = ALL_BUT_A_SOURCE
    while name in sources:
        name += "_"
    return name


def passed_samples(samples: ValidationSamples, pass_reward: float) -> np.ndarray:
    """Tells of each episode whether it passes: by `acc` where every one has that, else by reward.

    Returns: (episodes,) bool.
    """
    if _has_accuracy(samples):
        return passes(np.array(samples.infos[ACCURACY], dtype=np.float64), 1.0)
    return passes(np.array(samples.rewards, dtype=np.float64), pass_reward)


def _has_accuracy(samples: ValidationSamples) -> bool:
    values = samples.infos.get(ACCURACY, [None])
    are_numbers = all(
        isinstance(value, bool | int | float | np.number | np.bool_) for value in values
    )
    return are_numbers and bool(np.isfinite(np.array(values, dtype=np.float64)).all())


def pass_rule(samples: ValidationSamples, pass_reward: float) -> str:
    """Says what makes an episode pass."""
    if _has_accuracy(samples):
        return f"{ACCURACY} 1"
    return f"a reward of {pass_reward:g} or more"


def source_summary(
    samples: ValidationSamples, tasks: np.ndarray, passed: np.ndarray
) -> dict[str, Any]:
    """Estimates what the model does on tasks of one source; `tasks` (tasks, n) are row numbers."""
    rewards = np.array(samples.rewards, dtype=np.float64)[tasks]  # (tasks, n)
    tokens = np.array(samples.tokens)[tasks]
    n = rewards.shape[1]
    bounds = reward_bounds(rewards)
    summary: dict[str, Any] = {
        "tasks": len(tasks),
        "samples": n,
        "mean": asdict(estimate(rewards.mean(axis=1), bounds=bounds)),
        "std_over_tasks": spread_over_tasks(rewards),
        "std_over_samples": spread_over_samples(rewards),
        "tokens_per_episode": float(tokens.mean()),
    }
    for k in subset_sizes(n):
        summary[f"pass@{k}"] = asdict(estimate_share(pass_at_k(passed[tasks], k)))
    votes = samples.infos.get("pred", [None] * len(samples.uids))
    if n > 1 and any(votes[row] is not None for row in tasks.flat):
        texts = [[str(votes[row]) for row in rows] for rows in tasks]
        for k in subset_sizes(n):
            summary[f"maj@{k}"] = asdict(estimate(majority_at_k(texts, rewards, k), bounds=bounds))
    return summary


def task_entries(
    samples: ValidationSamples, rows: np.ndarray, passed: np.ndarray
) -> dict[str, Any]:
    """Lists what a task's samples got."""
    first = rows[0]
    entries: dict[str, Any] = {
        "uid": samples.uids[first],
        "source": samples.sources[first],
        "rewards": [samples.rewards[row] for row in rows],
        "passed": [bool(passed[row]) for row in rows],
        "endings": [samples.endings[row] for row in rows],
        "tokens": [samples.tokens[row] for row in rows],
    }
    if "pred" in samples.infos:
        entries["pred"] = [samples.infos["pred"][row] for row in rows]
    return entries


def score_metrics(sources: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Returns pass@k and maj@k with their intervals, by the names of a run's metrics."""
    metrics = {}
    for source, summary in sources.items():
        for name, entry in summary.items():
            if name.startswith(("pass@", "maj@")):
                metrics[f"val-core/{source}/reward/{name}"] = entry["value"]
                if entry["low"] is not None:
                    metrics[f"val-core/{source}/reward/{name}/ci_low"] = entry["low"]
                    metrics[f"val-core/{source}/reward/{name}/ci_high"] = entry["high"]
    return metrics


# For people


def describe(result: Mapping[str, Any], name: str) -> str:
    """Makes the table of an evaluation that the console shows."""
    lines = [_headline(result, name)]
    for source, summary in result["sources"].items():
        lines += ["", f"  {source}: {count(summary['tasks'], 'task')}"]
        lines += [f"    {row}" for row in _rows(summary)]
    endings = ", ".join(f"{ending} {number}" for ending, number in result["endings"].items())
    lines += ["", f"  endings: {endings}"]
    if result["failed_episodes"]:
        lines.append(
            f"  {result['failed_episodes']} of {count(result['episodes'], 'episode')} failed and "
            "have reward 0 in these numbers"
        )
    if result["unscored_episodes"]:
        lines.append(
            f"  {result['unscored_episodes']} of {count(result['episodes'], 'episode')} have no "
            "score, as the judge or reward function failed, and have reward 0 in these numbers"
        )
    if result["attempts_played_again"]:
        number = count(result["attempts_played_again"], "failed attempt")
        lines.append(f"  {number} played again (agent.on_failure=refill)")
    if result["first_error"]:
        lines.append(f"  first error: {result['first_error']}")
    return "\n".join(lines)


def _headline(result: Mapping[str, Any], name: str) -> str:
    sampling = result["sampling"]
    how = "greedy"
    if sampling["do_sample"]:
        how = f"temperature {sampling['temperature']:g}"
        if sampling["top_p"] < 1:
            how += f", top_p {sampling['top_p']:g}"
        if sampling["top_k"] > 0:
            how += f", top_k {sampling['top_k']}"
    return (
        f"{name}: {count(result['tasks'], 'task')} x {count(result['samples_per_task'], 'sample')}"
        f", {how}, seeds of step {result['seeded_as_step']}; passing takes {result['pass']}; "
        "[95 % interval over tasks]"
    )


def _rows(summary: Mapping[str, Any]) -> list[str]:
    """Lists a source's numbers, a line each."""
    rows = [_row(f"mean@{summary['samples']}", summary["mean"])]
    spreads = {
        "over tasks": summary["std_over_tasks"],
        "over a task's samples": summary["std_over_samples"],
    }
    known = [f"{value:.3f} {over}" for over, value in spreads.items() if value is not None]
    if known:
        rows.append(f"{'std':<8} {', '.join(known)}")
    for name, entry in summary.items():
        if name.startswith(("pass@", "maj@")):
            rows.append(_row(name, entry))
    rows.append(f"{'tokens':<8} {summary['tokens_per_episode']:.1f} an episode")
    if summary["tasks"] == 1:
        rows.append("one task shows no interval")
    elif summary["mean"]["low"] is None:
        rows.append("all tasks got the same, and their rewards have no known range: no interval")
    return rows


def _row(name: str, entry: Mapping[str, Any]) -> str:
    found = Estimate(**entry)
    # Rewards of no known range may have values that few tasks do not show.
    note = " (approximate)" if found.approximate and found.low is not None else ""
    return f"{name:<8} {with_interval(found)}{note}"


def with_interval(found: Estimate) -> str:
    """Formats an estimate as `0.412 [0.371, 0.455]`."""
    if found.low is None or found.high is None:
        return f"{found.value:.3f}"
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def count(number: int, thing: str) -> str:
    """Formats a number of things, as `1 task` and `2 tasks`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


# Two models


def require_same_tasks(first: Pairing, second: Pairing) -> None:
    """Raises EnvironmentsFail where two models did not get the same tasks."""
    others = [uid for uid, text in first.begins.items() if second.begins.get(uid, text) != text]
    if first.tasks == second.tasks and not others:
        return
    how_many = f"{len(others)} of {len(first.begins)} tasks began" if others else "tasks are"
    raise EnvironmentsFail(
        f"{how_many} otherwise for the second model under the same seeds, so that nothing can be "
        "paired; each model's own numbers stand. Have reset(seed) draw from a generator of its "
        "own; agent.environment.isolation=process where global generators are drawn from"
    )


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Compares two models' results on the same tasks: source -> the first minus the second."""
    differences = {}
    for source in first["sources"]:
        of_first = task_rewards(first, source)
        of_second = task_rewards(second, source)
        ours = of_first.mean(axis=1)
        theirs = of_second.mean(axis=1)
        bounds = reward_bounds(np.concatenate([of_first, of_second]))
        difference = paired_difference(ours, theirs, bounds=bounds)
        wins = int((ours > theirs).sum())
        losses = int((ours < theirs).sum())
        differences[source] = {
            **asdict(difference),
            "shown": is_shown(difference),
            "tasks_better": wins,
            "tasks_worse": losses,
        }
    return differences


def task_rewards(result: Mapping[str, Any], source: str) -> np.ndarray:
    """Returns the rewards of a source's tasks, (tasks, n); of all where no task has that source."""
    rewards = [task["rewards"] for task in result["by_task"] if task["source"] == source]
    if not rewards:
        rewards = [task["rewards"] for task in result["by_task"]]
    return np.array(rewards, dtype=np.float64)


def say_difference(entries: Mapping[str, Any], first: str, second: str) -> str:
    """Says in a sentence which of two models is better, or that the tasks do not show it."""
    difference = Estimate(*(entries[name] for name in ("value", "low", "high", "tasks")))
    tasks = count(difference.tasks, "task")
    balance = f"better on {entries['tasks_better']}, worse on {entries['tasks_worse']}"
    if not entries["shown"]:
        why = ""
        if difference.tasks < FEWEST_TASKS_FOR_A_DIFFERENCE:
            why = f"; fewer than {FEWEST_TASKS_FOR_A_DIFFERENCE} never can"
        return (
            f"no difference that {tasks} can show: {first} minus {second} is "
            f"{with_interval(difference)}, {balance}{why}"
        )
    if difference.value < 0:
        low = None if difference.high is None else -difference.high
        high = None if difference.low is None else -difference.low
        turned = Estimate(-difference.value, low, high, difference.tasks)
        return (
            f"{second} better than {first} by {with_interval(turned)}, {tasks} ({first}: {balance})"
        )
    return f"{first} better than {second} by {with_interval(difference)}, {tasks} ({balance})"
