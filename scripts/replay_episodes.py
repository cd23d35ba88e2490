"""Reads recorded episodes from a file of `agent.episodes_dir`, and makes rows of them again.

Invariant: an episode that is returned has every entry of NEEDED, and each of its rows has one
number of tokens in every entry of PER_TOKEN.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from itertools import groupby
from pathlib import Path
from typing import Any

from training.run.episode_files import strict_json
from workers.environments.reply import StepReply
from workers.rollout.episode import Row, Span, Turn

# An episode as the file has it: turns and rows are lists of dicts.
Recorded = dict[str, Any]
# Which prompt group, episode and environment it is.
NAMES = ("uid", "episode_id", "data_source")
NEEDED = (*NAMES, "agent_index", "env_seed", "ending", "initial_messages", "turns", "rows")
PER_TOKEN = ("response_ids", "response_mask", "turn_ids", "log_probs", "rewards")


def read_episodes(path: Path, first: int | None = None) -> list[Recorded]:
    """Reads the episodes, each with `where` it stands in the file.

    A last line that is cut short is left out, with a printed line.

    Args:
        path: the file, an episode a line.
        first: read only so many; None = all.
    Raises:
        ValueError: another line is no JSON object, or an episode lacks something.
    """
    episodes: list[Recorded] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if first is not None and len(episodes) >= first:
                break
            where = f"{path.name} line {number}"
            try:
                episode = {**json.loads(line), "where": where}
            except (ValueError, TypeError) as error:
                if line.endswith(b"\n"):
                    raise ValueError(f"{where} is no episode: {error}") from error
                print(f"{where} is cut short, left out: the process ended while it wrote")
                break
            fault = fault_of(episode)
            if fault is not None:
                raise ValueError(f"{where}: {fault}")
            episodes.append(episode)
    return episodes


def fault_of(episode: Recorded) -> str | None:
    """Names what keeps the record from being an episode; None where nothing does."""
    missing = [name for name in NEEDED if name not in episode]
    if missing:
        return f"lacks {', '.join(missing)}; a file of agent.episodes_dir has them"
    for number, row in enumerate(episode["rows"]):
        lengths = {name: len(row[name]) for name in PER_TOKEN}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{length} {name}" for name, length in lengths.items())
            return f"row {number} has {counts}"
    return None


def as_read(ending: str, record: dict[str, Any]) -> Recorded:
    """Returns the record of an episode as it would be read from a file."""
    return json.loads(strict_json({"ending": ending, **record}))


def turn_of(record: Recorded) -> Turn:
    """Makes the turn whose record this is."""
    reply = None
    if record["done"] is not None:
        reply = StepReply(
            messages=record["observation"],
            seconds=record["env_seconds"],
            reward=record["reward"],
            done=record["done"],
            tool_calls=record["tool_calls"],
        )
    return Turn(text=record["text"], finish_reason=record["finish_reason"], reply=reply)


def row_of(record: Recorded) -> Row:
    """Makes the row whose record this is."""
    row = Row(prompt_ids=record["prompt_ids"])
    row.append_tokens(record["response_ids"], _as_numbers(record["log_probs"]))
    end = 0
    for turn, tokens in groupby(record["turn_ids"]):
        start = end
        end = start + len(list(tokens))
        # -1 is on tokens that were not sampled.
        if turn >= 0:
            row.spans.append(Span(start, end, turn))
    row.reward_at = {place: reward for place, reward in enumerate(record["rewards"]) if reward}
    return row


def _as_numbers(values: Sequence[float | None]) -> list[float]:
    """Puts NaN where the file says null."""
    return [float("nan") if value is None else value for value in values]


def timed_out(episode: Recorded) -> bool:
    """Checks whether a call of the episode ran into its deadline."""
    return episode["ending"] == "env_timeout"


def without_timed_out_call(episode: Recorded) -> Recorded:
    """Cuts the episode at a call that timed out, where the replay's engine aborts."""
    turns = episode["turns"]
    if not timed_out(episode) or not turns or turns[-1]["done"] is not None:
        return episode
    episode = deepcopy(episode)
    last_turn = len(turns) - 1
    row = episode["rows"][-1]
    length = len(row["turn_ids"])
    if last_turn in row["turn_ids"]:
        length = row["turn_ids"].index(last_turn)
    for name in PER_TOKEN:
        row[name] = row[name][:length]
    episode["turns"] = episode["turns"][:-1]
    episode["ending"] = "engine_error"
    return episode
