"""What leaves the engine's process of an episode: the facts for a step's metrics, and its record.

`episode_facts` is what the batch's column of that name holds, once for each episode; the metrics
(training/run) read nothing else of episodes. `episode_record` is a line of the run's episode files
(docs/episodes.md), which scripts/replay.py reads. Invariant: both are plain data, as JSON holds it.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from data.packed_arrays import pack_typed
from workers.environments.reply import StepReply
from workers.rollout.episode import FAILURES, Episode, FailedAttempt, Row, Turn, digest
from workers.rollout.token_origins import OVER_LIMIT, TEMPLATE, RowOrigins, forked_from

# Translates origins to 1 on what the template added, and 0.
IS_TEMPLATE = bytes(int(origin in (TEMPLATE, OVER_LIMIT)) for origin in range(256))


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
        info: the environment's numbers; of a name that several turns give the last counts. Of a
            program what is counted of its requests, and its own metrics.
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


def episode_record(episode: Episode, origins: Sequence[RowOrigins] | None = None) -> dict[str, Any]:
    """Returns all of an episode: the conversation, the ids, and the rewards that it was paid.

    Of a program also its exit code, and the ends of what it wrote.

    Args:
        origins: of each row's tokens; None: they are not told.
    """
    told: Sequence[RowOrigins | None] = [None] * len(episode.rows) if origins is None else origins
    parents = parents_of(episode.rows)
    if any(turn.asked is not None for turn in episode.turns):
        parents = parents_in_program(episode, parents)
    rows = []
    for row, of_row, parent in zip(episode.rows, told, parents, strict=True):
        rows.append({**row_record(row, of_row), "parent": parent})
    return {
        "program": episode.program,
        "attempt": episode.attempt,
        "task": episode.task,
        "initial_messages": episode.initial_messages,
        "turns": [turn_record(turn) for turn in episode.turns],
        "rows": rows,
        "failed_attempts": [attempt_record(attempt) for attempt in episode.failed_attempts],
    }


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


def row_record(row: Row, origins: RowOrigins | None = None) -> dict[str, Any]:
    """Returns a row, in packed arrays with an entry a token.

    Log-probs are 0 on what nobody sampled; `weight_versions` are there where tokens of several
    occur; `template_mask` is null where the template's tokens cannot be told.
    """
    size = len(row.ids)
    # No numpy: rows are many and short.
    turn_ids = array("h", [-1]) * size
    response_mask = array("b", bytes(size))
    rewards = array("f", bytes(4 * size))
    for span in row.spans:
        length = span.end - span.start
        turn_ids[span.start : span.end] = array("h", [span.turn]) * length
        response_mask[span.start : span.end] = array("b", [1]) * length
    for position, reward in row.reward_at.items():
        rewards[position] = reward
    record: dict[str, Any] = {
        "prompt_ids": pack_typed(array("i", row.prompt_ids)),
        "response_ids": pack_typed(row.ids),
        "response_mask": pack_typed(response_mask),
        "log_probs": pack_typed(row.log_probs),
        "turn_ids": pack_typed(turn_ids),
        "rewards": pack_typed(rewards),
        "template_mask": None,
    }
    if origins is not None and origins.is_told:
        is_template = array("b", origins.origins.translate(IS_TEMPLATE))
        record["template_mask"] = pack_typed(is_template)
    if row.spans and any(span.version != row.spans[0].version for span in row.spans):
        versions = array("i", [-1]) * size
        for span in row.spans:
            versions[span.start : span.end] = array("i", [span.version]) * (span.end - span.start)
        record["weight_versions"] = pack_typed(versions)
    return record


def parents_of(rows: Sequence[Row]) -> list[dict[str, int] | None]:
    """Finds, for each row, the earlier row whose ids it begins with, and how many these are.

    Rewritten histories and branches share what came before them; None: there is no such row.
    """
    if len(rows) == 1:
        return [None]
    ids = [np.array(row.token_ids, dtype=np.int64) for row in rows]
    parents: list[dict[str, int] | None] = []
    for number, own in enumerate(ids):
        shared = [common_length(own, earlier) for earlier in ids[:number]]
        longest = max(shared, default=0)
        # Of several the last one, from which the conversation went on.
        last = len(shared) - 1 - shared[::-1].index(longest) if longest else 0
        parents.append({"row": last, "tokens": longest} if longest else None)
    return parents


def parents_in_program(
    episode: Episode, parents: Sequence[dict[str, int] | None]
) -> list[dict[str, int] | None]:
    """Corrects the parents of a program's rows.

    A fork's parent is the row that it was forked from. All conversations begin with a few tokens of
    the template's, and helpers with the same system message: a row that was begun anew has a parent
    only where it has all of that one's prompt, as where thinking was dropped.
    """
    corrected: list[dict[str, int] | None] = []
    for row, parent in zip(episode.rows, parents, strict=True):
        forked = forked_from(row, episode)
        if forked is not None:
            number, length = forked
            parent = {"row": number, "tokens": len(row.prompt_ids) + length}
        elif parent and parent["tokens"] < len(episode.rows[parent["row"]].prompt_ids):
            parent = None
        corrected.append(parent)
    return corrected


def common_length(first: np.ndarray, second: np.ndarray) -> int:
    """Counts the entries with which both arrays begin alike."""
    shorter = min(len(first), len(second))
    differs = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(differs[0]) if len(differs) else shorter
