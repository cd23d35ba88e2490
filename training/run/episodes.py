"""What is kept of a step's episodes: their records, for replay, and their metrics."""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from custom.agent import AgentSpec
from custom.tools import UNKNOWN
from data.protocol import DataProto
from workers.rollout.episode import ENDINGS

logger = logging.getLogger(__name__)


def write_episodes(folder: Path, batch: DataProto) -> None:
    """Writes a rollout's episodes to FOLDER/STEP.jsonl (validation's to val-STEP.jsonl), further ones of a step behind.

    A line is an episode in strict JSON, as `scripts/replay.py` reads it; a process that dies while it writes leaves all
    lines but the last whole.
    """
    meta, columns = batch.meta_info, batch.non_tensor_batch
    path = folder / f"{'val-' if meta['validate'] else ''}{meta['global_steps']}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w" if 0 in columns["group_index"] else "a") as file:
        for i, facts in enumerate(columns["episode_facts"]):
            if facts is not None:
                own = {name: columns[name][i] for name in ("uid", "episode_id", "data_source")}
                own |= {name: int(columns[name][i]) for name in ("agent_index", "env_seed")}
                entries = {"step": meta["global_steps"], **own, **facts}
                file.write(strict_json(entries | entries.pop("record")) + "\n")


def strict_json(entries: Mapping[str, Any]) -> str:
    """Writes one line of JSON; numbers that are not finite become null, objects that JSON has not become text."""
    try:
        return json.dumps(entries, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(entries, default=str), parse_constant=lambda _: None))


def environment_name(spec: AgentSpec) -> str:
    """Returns what metrics call it: textarena:GuessTheNumber-v0, or the name of a class."""
    source = spec.environment
    if isinstance(source, str):
        return source.rsplit(":", 1)[-1] if source.partition(":")[0].endswith(".py") else source
    return getattr(source, "__name__", type(source).__name__)


def episode_metrics(facts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Counts a step's endings, turns, environment time and tool calls.

    `agent/ending/NAME` count episodes by their last attempt, `agent/retries` the attempts before it; seconds are wall
    time, means over episodes or calls; `tool/NAME/failures` count every call that gave an error, by kind under
    `tool_failures/KIND`.
    """
    endings = Counter(fact["ending"] for fact in facts)
    turns = np.array([fact["turns"] for fact in facts])
    metrics = {f"agent/ending/{name}": float(endings[name]) for name in ENDINGS}
    metrics |= {
        "agent/turns/mean": float(turns.mean()),
        "agent/turns/max": float(turns.max()),
        "agent/cut_turns": float(sum(fact["cut_turns"] for fact in facts)),
        "agent/retries": float(sum(fact["attempts"] - 1 for fact in facts)),
        "agent/env_seconds/mean": float(np.mean([fact["env_seconds"] for fact in facts])),
        "agent/env_seconds/max": float(np.max([fact["env_seconds"] for fact in facts])),
        "agent/episode_seconds/max": float(np.max([fact["seconds"] for fact in facts])),
    }
    if errors := [fact["error"] for fact in facts if fact["error"]]:
        logger.warning("%d episodes failed; the first: %s", len(errors), errors[0])
    return metrics | tool_metrics([call for fact in facts for call in fact["tool_calls"]])


def tool_metrics(calls: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Counts calls, failures and seconds of each tool; calls that name no tool, or an invented one, as `unknown`."""
    by_tool: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for call in calls:
        invented = call["error_kind"] == "unknown_tool" or call["name"] == UNKNOWN
        by_tool["unknown" if invented else call["name"]].append(call)
    metrics: dict[str, float] = {}
    for name, own in by_tool.items():
        metrics[f"tool/{name}/calls"] = float(len(own))
        metrics[f"tool/{name}/failures"] = float(sum(not call["ok"] for call in own))
        metrics[f"tool/{name}/seconds"] = float(np.mean([call["seconds"] for call in own]))
    failures = Counter(call["error_kind"] for call in calls if not call["ok"])
    return metrics | {f"tool_failures/{kind}": float(count) for kind, count in failures.items()}
