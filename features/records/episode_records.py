"""What a run records of an episode: a line of its episode files, which scripts/replay.py reads.

Invariant: a record is plain data, as JSON holds it.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from data.json_lines import json_object
from data.warn_once import warn_once
from features.records.row_records import complete_rows, row_records
from features.records.token_origins import RowOrigins
from workers.environments.reply import StepReply
from workers.rollout.episode import Episode, FailedAttempt, Turn
from workers.rollout.episode_facts import episode_facts as episode_facts


def episode_records(
    episodes: Sequence[Episode], origins: Sequence[Sequence[RowOrigins]] | None = None
) -> list[dict[str, Any]]:
    """Returns all of each episode.

    Args:
        origins: of each episode's rows, of their tokens; None: they are not told.
    """
    rows = row_records([row for episode in episodes for row in episode.rows])
    told = origins or [[]] * len(episodes)
    return [
        episode_record(episode, rows, of_rows)
        for episode, of_rows in zip(episodes, told, strict=True)
    ]


def episode_record(
    episode: Episode, rows: Iterator[dict[str, Any]], origins: Sequence[RowOrigins] = ()
) -> dict[str, Any]:
    """Returns all of an episode: the conversation, the ids, and the rewards that it was paid.

    Of a program also its exit code, and the ends of what it wrote.

    Args:
        rows: `row_records`, of which the episode's own come next.
        origins: of each row's tokens; empty: they are not told.
    """
    of_rows = list(islice(rows, len(episode.rows)))
    complete_rows(of_rows, episode, origins)
    return {
        "program": episode.program,
        "attempt": episode.attempt,
        "task": episode.task,
        "task_name": task_name_of(episode),
        "initial_messages": episode.initial_messages,
        "turns": [turn_record(turn) for turn in episode.turns],
        "rows": of_rows,
        "failed_attempts": [attempt_record(attempt) for attempt in episode.failed_attempts],
    }


def encode_record(facts: Mapping[str, Any], record: Mapping[str, Any]) -> bytes | None:
    """Writes an episode's facts and record as one object in JSON, as soon as they are made.

    So the record's many small objects are gone at once. The reward is left out, as a trainer may
    give another one. A record that cannot be written is None, and logged: it costs
    itself, not the run.
    """
    # The number of turns gives way to the turns.
    entry = {**facts, **record}
    del entry["reward"]
    try:
        return json_object(entry)
    # Tasks and replies hold objects of users' own.
    except Exception as error:
        kind = type(error).__name__
        warn_once(__name__, f"episodes not recorded, the run goes on: {kind}: {error}")
        return None


def turn_record(turn: Turn) -> dict[str, Any]:
    """Returns a turn; `done` is null where the environment gave no reply.

    A turn that was written for a new context `writes` that, and says whether it is `trained`, and
    so does one that the environment asked for, which is `aside`; a reply that replaced the
    conversation says so.
    """
    reply = turn.reply or StepReply()
    record = {
        "text": turn.text,
        "reward": reply.reward or 0.0,
        "finish_reason": turn.finish_reason,
        "observation": reply.messages,
        "done": None if turn.reply is None else reply.done,
        "engine_seconds": turn.engine_seconds,
        "env_seconds": reply.seconds,
        "tool_calls": reply.tool_calls,
        "info": reply.info,
        "anchor": turn.anchor,
        "asked": turn.asked,
        "behind": turn.behind,
    }
    if turn.writes:
        record |= {"writes": turn.writes, "trained": turn.is_trained}
    if turn.aside:
        record["aside"] = True
    if reply.replaces_history:
        record["replaces_history"] = True
    return record


def task_name_of(episode: Episode) -> str:
    """Returns what the environment called its task last; "" where it gave no name."""
    names = [turn.reply.task for turn in episode.turns if turn.reply and turn.reply.task]
    return names[-1] if names else ""


def attempt_record(attempt: FailedAttempt) -> dict[str, Any]:
    """Returns an attempt that failed and was played again."""
    turns = []
    for turn in attempt.turns:
        observation = turn.reply.messages if turn.reply is not None else []
        turns.append({"text": turn.text, "observation": observation})
    return {"turns": turns, "ending": attempt.ending, "error": attempt.error}
