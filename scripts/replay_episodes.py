"""Reads recorded episodes from a run's file of them, and makes rows of them again.

Invariant: the arrays of an episode's rows are lists, of one number of tokens each.
"""

from __future__ import annotations

import json
from copy import deepcopy
from itertools import groupby
from pathlib import Path
from typing import Any

from data.json_lines import strict_json
from training.features import require_feature
from workers.environments.reply import StepReply
from workers.rollout.episode import LEFT, Row, Span, Turn

require_feature("records", "scripts/replay.py")

from features.records.episode_files import ARRAYS, NEEDED, PER_TOKEN, Recorded, unpacked  # noqa: E402
from features.records.episode_files import NAMES as NAMES  # noqa: E402
from features.records.episode_files import read_episodes as read_arrays  # noqa: E402


def read_episodes(path: Path, first: int | None = None) -> list[Recorded]:
    """Reads the episodes of a file, each with `where` it stands there; arrays are lists.

    Args:
        path, first: as of `features.records.episode_files.read_episodes`, which raises ValueError.
    """
    return [_as_lists(episode) for episode in read_arrays(path, first)]


def _as_lists(episode: Recorded) -> Recorded:
    """Returns an episode with its rows' arrays as lists."""
    rows = []
    for row in episode["rows"]:
        lists = {name: row[name].tolist() for name in ARRAYS if row.get(name) is not None}
        rows.append({**row, **lists})
    return {**episode, "rows": rows}


def as_read(ending: str, record: dict[str, Any]) -> Recorded:
    """Returns the record of an episode as it would be read from a file."""
    names = dict.fromkeys(NEEDED, "")
    read = json.loads(strict_json({**names, "ending": ending, **record, "where": "the replay"}))
    return _as_lists(unpacked(read))


def turn_of(record: Recorded) -> Turn:
    """Makes the turn whose record this is."""
    reply = None
    if record["done"] is not None:
        reply = StepReply(
            messages=record["observation"],
            seconds=record["env_seconds"],
            reward=record["reward"],
            done=record["done"],
            replaces_history=record.get("replaces_history", False),
            tool_calls=record["tool_calls"],
        )
    return Turn(
        text=record["text"],
        finish_reason=record["finish_reason"],
        reply=reply,
        writes=record.get("writes", ""),
        aside=record.get("aside", False),
        is_trained=record.get("trained", True),
    )


def row_of(record: Recorded) -> Row:
    """Makes the row whose record this is."""
    row = Row(prompt_ids=record["prompt_ids"], aside=record.get("aside", False))
    row.append_tokens(record["response_ids"], record["log_probs"])
    end = 0
    for turn, tokens in groupby(record["turn_ids"]):
        start = end
        end = start + len(list(tokens))
        # -1 is on tokens that were not sampled.
        if turn >= 0:
            row.spans.append(Span(start, end, turn))
    row.reward_at = {place: reward for place, reward in enumerate(record["rewards"]) if reward}
    return row


def without_asides(episode: Recorded) -> Recorded:
    """Returns the episode without the rows and turns that its environment asked the policy for.

    The other turns are numbered anew. `aside_tokens` says how many tokens were left out once the
    environment had answered a turn, or the reset: they count for the episode's limit.
    """
    if not any(turn.get("aside") for turn in episode["turns"]):
        return episode
    episode = deepcopy(episode)
    kept = [number for number, turn in enumerate(episode["turns"]) if not turn.get("aside")]
    next_turns = [*kept, len(episode["turns"])]
    episode["aside_tokens"] = aside_tokens_before(episode, next_turns[0])
    for number, next_turn in zip(kept, next_turns[1:], strict=True):
        episode["turns"][number]["aside_tokens"] = aside_tokens_before(episode, next_turn)
    numbers = {old: new for new, old in enumerate(kept)} | {-1: -1}
    episode["turns"] = [episode["turns"][number] for number in kept]
    episode["rows"] = [row for row in episode["rows"] if not row.get("aside")]
    for row in episode["rows"]:
        row["turn_ids"] = [numbers[number] for number in row["turn_ids"]]
    return episode


def aside_tokens_before(episode: Recorded, turn: int) -> int:
    """Counts the tokens of what the environment had asked for when this turn began."""
    tokens = 0
    for row in episode["rows"]:
        if row.get("aside"):
            places = [k for k, number in enumerate(row["turn_ids"]) if 0 <= number < turn]
            tokens += max(places, default=-1) + 1
    return tokens


def timed_out(episode: Recorded) -> bool:
    """Checks whether a call of the episode ran into its deadline."""
    return episode["ending"] == "env_timeout"


def without_timed_out_call(episode: Recorded) -> Recorded:
    """Cuts the episode at a call that timed out, or that a person left, where the replay aborts."""
    turns = episode["turns"]
    was_cut = timed_out(episode) or episode["ending"] == LEFT
    if not was_cut or not turns or turns[-1]["done"] is not None:
        return episode
    # No environment answers what a history had the policy write.
    if turns[-1].get("writes"):
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
