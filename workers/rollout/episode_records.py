"""Makes what leaves the engine's process of an episode: facts for metrics, and its record.

`episode_facts` is what the batch's column of that name holds, once for each episode; the metrics
(training/run) read nothing else of episodes. An episode's record is a line of the run's episode
files (features/records/README.md), which scripts/replay.py reads. Invariant: both are plain data,
as JSON holds it.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from data.json_lines import json_object
from data.warn_once import warn_once
from features.records.row_records import complete_rows, row_records
from features.records.token_origins import RowOrigins
from workers.environments.reply import StepReply
from workers.rollout.episode import FAILURES, Episode, FailedAttempt, Turn, digest


def episode_facts(episode: Episode) -> dict[str, Any]:
    """Returns what a step needs to know of an episode, once the failure policy was applied.

    Returns:
        observation, done: of the last reply.
        ending, error: how it ended; the error is of the first attempt that failed.
        environment, group: their numbers.
        begins: a digest of its first messages, equal for the members of a group.
        turns, attempts, cut_turns: counts.
        env_seconds: the environment's own time; seconds: wall time.
        tool_calls: of all turns.
        models: what was asked of models beside the policy, in all attempts.
        info: the environment's numbers; the last turn that gives a name counts. A program has the
            counts of its requests here, and its own metrics.
        sampled_tokens: of all turns.
        paid: what the environment gave in all, 0 where the episode failed; reward: the sum over the
            episode's rows, which it is to be but for `agent.overflow_reward`.
        masked: none of its tokens is trained on.
    """
    replies = [turn.reply for turn in episode.turns if turn.reply]
    last_reply = episode.turns[-1].reply if episode.turns else None
    observation = ""
    done = False
    if last_reply is not None:
        observation = "\n".join(message["content"] for message in last_reply.messages)
        done = last_reply.done
    tool_calls: list[dict[str, Any]] = []
    info: dict[str, float] = {}
    for reply in replies:
        tool_calls += reply.tool_calls
        info |= reply.info
    for name, count in episode.program.get("counts", {}).items():
        info[f"program_{name}"] = float(count)
    info |= episode.program.get("metrics", {})
    first_messages = episode.initial_messages
    return {
        "observation": observation,
        "done": done,
        "ending": episode.ending,
        "error": episode.first_error,
        "environment": episode.spec,
        "group": episode.group,
        "begins": digest(first_messages) if first_messages else "",
        "turns": len(episode.turns),
        "attempts": episode.attempt + 1,
        "cut_turns": sum(1 for turn in episode.turns if turn.finish_reason == "length"),
        "env_seconds": episode.env_seconds,
        "seconds": episode.seconds,
        "tool_calls": tool_calls,
        "models": episode.models,
        "info": info,
        "sampled_tokens": sum(turn.tokens for turn in episode.turns),
        "paid": reward_paid(episode),
        "reward": float(sum(sum(row.reward_at.values()) for row in episode.rows)),
        "masked": not any(row.spans for row in episode.rows),
    }


def reward_paid(episode: Episode) -> float:
    """Sums what the environment gave, whatever the rows hold."""
    if episode.ending in FAILURES:
        return 0.0
    if episode.final_reward is not None:
        return episode.final_reward
    return sum(turn.reply.reward or 0.0 for turn in episode.turns if turn.reply)


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
    """Returns a turn; `done` is null where the environment gave no reply."""
    reply = turn.reply or StepReply()
    return {
        "text": turn.text,
        "reward": reply.reward or 0.0,
        "finish_reason": turn.finish_reason,
        "observation": reply.messages,
        "done": None if turn.reply is None else reply.done,
        "env_seconds": reply.seconds,
        "tool_calls": reply.tool_calls,
        "info": reply.info,
        "anchor": turn.anchor,
        "asked": turn.asked,
        "behind": turn.behind,
    }


def attempt_record(attempt: FailedAttempt) -> dict[str, Any]:
    """Returns an attempt that failed and was played again."""
    turns = []
    for turn in attempt.turns:
        observation = turn.reply.messages if turn.reply is not None else []
        turns.append({"text": turn.text, "observation": observation})
    return {"turns": turns, "ending": attempt.ending, "error": attempt.error}
