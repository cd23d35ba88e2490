"""Computes a step's metrics of its episodes: endings, turns, environments, tools.

They read the facts of each episode, dictionaries as `workers.rollout.episode_facts` makes them.
To add one, compute it in `episode_metrics` from the facts.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from custom.tools import UNKNOWN
from data.warn_once import warn_first, warn_once
from training.batch.row_groups import rows_by_key
from training.run.abort_policy import by_group, warn_of_crashing_groups
from workers.rollout.episode import ENDINGS, FAILURES

logger = logging.getLogger(__name__)
EpisodeFacts = Mapping[str, Any]


def episode_metrics(
    episodes: Sequence[EpisodeFacts], names: Sequence[str] = ("environment",)
) -> dict[str, float]:
    """Counts a step's endings, turns, environment time and tool calls.

    With several environments it does so for each of them, too.

    Args:
        episodes: the facts of each of the step's episodes, one at least.
        names: of the environments.
    Returns:
        `agent/ending/NAME` count episodes by their last attempt, `agent/retries` the attempts
        before it; `agent/masked` and `agent/masked_groups` count what is not trained on; seconds
        are wall time, means over episodes or calls; `agent/info/NAME/mean` is that of the last
        number of that name that an episode's steps gave in their info; `tool/NAME/failures` count
        every call that gave an error, by kind under `tool_failures/KIND`.
    """
    metrics: dict[str, float] = {}
    endings = Counter(episode["ending"] for episode in episodes)
    for ending in ENDINGS:
        metrics[f"agent/ending/{ending}"] = float(endings[ending])
    masked_groups = [
        group for group in by_group(episodes) if all(episode["masked"] for episode in group)
    ]
    metrics["agent/episodes"] = float(len(episodes))
    metrics["agent/failed"] = float(sum(endings[ending] for ending in FAILURES))
    metrics["agent/cut_turns"] = float(sum(episode["cut_turns"] for episode in episodes))
    metrics["agent/cut_observations"] = float(
        sum(episode["cut_observations"] for episode in episodes)
    )
    metrics["agent/masked"] = float(sum(episode["masked"] for episode in episodes))
    metrics["agent/retries"] = float(sum(episode["attempts"] - 1 for episode in episodes))
    metrics["agent/masked_groups"] = float(len(masked_groups))
    metrics["agent/episode_seconds/max"] = float(max(episode["seconds"] for episode in episodes))
    for name in ("turns", "env_seconds"):
        values = [episode[name] for episode in episodes]
        metrics[f"agent/{name}/max"] = float(max(values))
        metrics[f"agent/{name}/mean"] = float(np.mean(values))
    for name, values in _infos(episodes).items():
        metrics[f"agent/info/{name}/mean"] = float(np.mean(values))
    if len(names) > 1:
        metrics.update(environment_metrics(episodes, names))
    calls = []
    for episode in episodes:
        calls += episode["tool_calls"]
    metrics.update(tool_metrics(calls))
    _warn_of_raising_tools(calls)
    _warn_of_errors(episodes)
    warn_of_crashing_groups(episodes, names)
    return metrics


def _infos(episodes: Sequence[EpisodeFacts]) -> dict[str, list[float]]:
    """Collects what environments gave in their info, by name; masked episodes are left out."""
    infos: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        if not episode["masked"]:
            for name, value in episode["info"].items():
                infos[name].append(value)
    return infos


def _warn_of_errors(episodes: Sequence[EpisodeFacts]) -> None:
    """Logs how many environments failed, and the first error with its traceback, once."""
    errors = [episode["error"] for episode in episodes if episode["error"]]
    if not errors:
        return
    warn_once(__name__, f"an environment failed: {errors[0]}")
    logger.warning(
        "environments failed in %s episodes, their last attempt or one before; first: %s",
        len(errors),
        errors[0].splitlines()[0],
    )


def _warn_of_raising_tools(calls: Sequence[Mapping[str, Any]]) -> None:
    """Logs the first exception of each tool's code, once."""
    for call in calls:
        if call.get("raised"):
            name = call["name"]
            warn_first(
                __name__,
                name,
                f"tool {name}: {call['raised']}; the policy reads it as the answer to its call, "
                f"and further ones are only counted (tool/{name}/failures)",
            )


def environment_metrics(episodes: Sequence[EpisodeFacts], names: Sequence[str]) -> dict[str, float]:
    """Counts each environment's episodes and failures, and averages their turns and rewards.

    Masked episodes have no part in the rewards.
    """
    metrics: dict[str, float] = {}
    for number, name in enumerate(names):
        played = [episode for episode in episodes if episode["environment"] == number]
        metrics[f"env/{name}/episodes"] = float(len(played))
        if not played:
            continue
        failed = [episode for episode in played if episode["ending"] in FAILURES]
        rewards = [episode["reward"] for episode in played if not episode["masked"]]
        metrics[f"env/{name}/failed"] = float(len(failed))
        metrics[f"env/{name}/turns"] = float(np.mean([episode["turns"] for episode in played]))
        if rewards:
            metrics[f"env/{name}/reward"] = float(np.mean(rewards))
    return metrics


def tool_metrics(calls: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Counts calls, failures and seconds of each tool.

    Calls that name no tool, or an invented one, count as `unknown`.
    """
    metrics: dict[str, float] = {}
    for name, numbers in rows_by_key(_tool_name(call) for call in calls).items():
        tool_calls = [calls[number] for number in numbers]
        failed = [call for call in tool_calls if not call["ok"]]
        metrics[f"tool/{name}/calls"] = float(len(tool_calls))
        metrics[f"tool/{name}/failures"] = float(len(failed))
        metrics[f"tool/{name}/cut"] = float(sum("chars_left_out" in call for call in tool_calls))
        metrics[f"tool/{name}/seconds"] = float(np.mean([call["seconds"] for call in tool_calls]))
    failures = Counter(call["error_kind"] for call in calls if not call["ok"])
    for kind, count in failures.items():
        metrics[f"tool_failures/{kind}"] = float(count)
    return metrics


def _tool_name(call: Mapping[str, Any]) -> str:
    if call["error_kind"] == "unknown_tool" or call["name"] == UNKNOWN:
        return "unknown"
    return call["name"]
