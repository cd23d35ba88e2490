"""What is kept of a step's episodes: their records, for replay, and their metrics."""

import json
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from custom.tools import UNKNOWN
from data.protocol import DataProto
from data.texts import say, warn_once
from training.batch.batching import rows_by_key
from workers.rollout.episode import ENDINGS, FAILURES

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


def readable_rows(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Any]]:
    """Yields each scored row as text: `uid`, `input`, `output` and `score`."""
    batch = batch.drop_dummies()
    prompts, responses = batch.batch["prompts"], batch.batch["responses"]
    width, mask = prompts.shape[1], batch.batch["attention_mask"].bool()
    for i, score in enumerate(batch.batch["token_level_scores"].sum(dim=1).tolist()):
        read = tokenizer.decode(prompts[i][mask[i, :width]])
        written = tokenizer.decode(responses[i][mask[i, width:]])
        yield {"uid": batch.non_tensor_batch["uid"][i], "input": read, "output": written, "score": score}


def strict_json(entries: Mapping[str, Any]) -> str:
    """Writes one line of JSON; numbers that are not finite become null, objects that JSON has not become text."""
    try:
        return json.dumps(entries, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(entries, default=str), parse_constant=lambda _: None))


class EnvironmentsFail(RuntimeError):
    """Ends a run whose environments do not give what a run can learn from; says which, and the fix."""


def require_same_tasks(facts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Raises EnvironmentsFail where a group's members, who had the same seed, began with different messages."""
    begins: dict[tuple[int, int], set[str]] = defaultdict(set)
    for fact in (fact for fact in facts if fact["begins"]):
        begins[fact["group"], fact["environment"]].add(fact["begins"])
    if wrong := [key for key, hashes in begins.items() if len(hashes) > 1]:
        raise EnvironmentsFail(say("begins_differ", name=names[wrong[0][1]], wrong=len(wrong), groups=len(begins)))


class FailureWatch:
    """Ends a run whose environments fail: in more than `limit` of the attempts of the last three steps."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._steps: deque[tuple[int, int]] = deque(maxlen=3)

    def check(self, facts: Sequence[Mapping[str, Any]]) -> None:
        """Counts a step's attempts. Raises EnvironmentsFail, with the first error."""
        tried = sum(fact["attempts"] for fact in facts)
        ended_well = sum(fact["ending"] not in ("env_crash", "env_timeout") for fact in facts)
        self._steps.append((tried - ended_well, tried))
        failed, tries = (sum(column) for column in zip(*self._steps, strict=True))
        if len(self._steps) == 3 and failed > self.limit * tries:
            error = next((fact["error"] for fact in facts if fact["error"]), "")
            raise EnvironmentsFail(say("too_many_fail", failed=failed, tries=tries, limit=self.limit, error=error))


def episode_metrics(facts: Sequence[Mapping[str, Any]], names: Sequence[str] = ("environment",)) -> dict[str, float]:
    """Counts a step's endings, turns, environment time and tool calls; for several environments also of each.

    `agent/ending/NAME` count episodes by their last attempt, `agent/retries` the attempts before it; `agent/masked` and
    `agent/masked_groups` count what is not trained on; seconds are wall time, means over episodes or calls;
    `agent/info/NAME/mean` is that of the last number of that name that an episode's steps gave in their info;
    `tool/NAME/failures` count every call that gave an error, by kind under `tool_failures/KIND`.
    """
    endings = Counter(fact["ending"] for fact in facts)
    metrics: dict[str, float] = {f"ending/{name}": endings[name] for name in ENDINGS}
    metrics |= {"episodes": len(facts), "failed": sum(endings[name] for name in FAILURES)}
    metrics |= {name: sum(fact[name] for fact in facts) for name in ("cut_turns", "masked")}
    metrics["retries"] = sum(fact["attempts"] - 1 for fact in facts)
    metrics["masked_groups"] = sum(all(fact["masked"] for fact in group) for group in by_group(facts))
    metrics["episode_seconds/max"] = max(fact["seconds"] for fact in facts)
    told = {name: [fact[name] for fact in facts] for name in ("turns", "env_seconds")}
    metrics |= {f"{name}/max": max(values) for name, values in told.items()}
    for fact in facts:
        for name, value in fact["info"].items() if not fact["masked"] else ():
            told.setdefault(f"info/{name}", []).append(value)
    metrics |= {f"{name}/mean": np.mean(values) for name, values in told.items()}
    metrics = {f"agent/{name}": float(value) for name, value in metrics.items()}
    if len(names) > 1:
        metrics |= environment_metrics(facts, names)
    if errors := [fact["error"] for fact in facts if fact["error"]]:
        # With its traceback.
        warn_once(__name__, f"an environment failed: {errors[0]}")
        logger.warning(say("some_fail", count=len(errors), first=errors[0].splitlines()[0]))
    warn_of_crashing_groups(facts, names)
    return metrics | tool_metrics([call for fact in facts for call in fact["tool_calls"]])


def environment_metrics(facts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, float]:
    """Gives for each environment its episodes, their mean reward (masked ones left out), turns and failures."""
    metrics: dict[str, float] = {}
    for index, name in enumerate(names):
        own = [fact for fact in facts if fact["environment"] == index]
        metrics[f"env/{name}/episodes"] = float(len(own))
        if own:
            metrics[f"env/{name}/failed"] = float(sum(fact["ending"] in FAILURES for fact in own))
        told = {"turns": own, "reward": [fact for fact in own if not fact["masked"]]}
        metrics |= {f"env/{name}/{key}": float(np.mean([f[key] for f in rows])) for key, rows in told.items() if rows}
    return metrics


def by_group(facts: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Lists the groups' episodes."""
    return [[facts[i] for i in members] for members in rows_by_key(fact["group"] for fact in facts).values()]


def warn_of_crashing_groups(facts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Warns of groups whose members crash while others' do not: an action may be what crashes them.

    Such a crash is played again or masked, and so goes unpunished.
    """
    groups = by_group(facts)
    crashes = [sum(fact["attempts"] - (fact["ending"] != "env_crash") for fact in group) for group in groups]
    attempts = [sum(fact["attempts"] for fact in group) for group in groups]
    for group, own, tries in zip(groups, crashes, attempts, strict=True):
        rest, of = sum(crashes) - own, sum(attempts) - tries
        if len(group) > 1 and own >= 2 and of and own / tries > 4 * max(rest / of, 1 / of):
            name, number = names[group[0]["environment"]], group[0]["group"]
            logger.warning(say("group_crashes", name=name, group=number, crashes=own, tries=tries, rest=rest, of=of))


def tool_metrics(calls: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Counts calls, failures and seconds of each tool; calls that name no tool, or an invented one, as `unknown`."""
    invented = [call["error_kind"] == "unknown_tool" or call["name"] == UNKNOWN for call in calls]
    names = ("unknown" if unknown else call["name"] for call, unknown in zip(calls, invented, strict=True))
    metrics: dict[str, float] = {}
    for name, members in rows_by_key(names).items():
        own = [calls[i] for i in members]
        metrics[f"tool/{name}/calls"] = float(len(own))
        metrics[f"tool/{name}/failures"] = float(sum(not call["ok"] for call in own))
        metrics[f"tool/{name}/seconds"] = float(np.mean([call["seconds"] for call in own]))
    failures = Counter(call["error_kind"] for call in calls if not call["ok"])
    return metrics | {f"tool_failures/{kind}": float(count) for kind, count in failures.items()}
