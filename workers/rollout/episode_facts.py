"""The facts of an episode that leave the engine's process, for a step's metrics.

`episode_facts` is what the batch's column of that name holds, once for each episode; the metrics
(training/run) read nothing else of episodes. Invariant: facts are plain data, as JSON holds it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from custom.env_calls import LEFT_OUT
from data.own_names import keep_own
from workers.environments.reply import StepReply
from workers.rollout.episode import FAILURES, Episode, Turn, digest


def episode_facts(episode: Episode) -> dict[str, Any]:
    """Returns what a step needs to know of an episode, once the failure policy was applied.

    Returns:
        observation, done: of the last reply.
        ending, error: how it ended; the error is of the first attempt that failed.
        environment, group, sample: their numbers.
        begins: a digest of its first messages, equal for the members of a group.
        turns, attempts, cut_turns: counts, of turns that were sampled for the environment;
            cut_observations: turns whose reply was too long, so that its middle is left out.
        env_seconds: the environment's own time; seconds: wall time.
        tool_calls: of all turns.
        models: what was asked of models beside the policy, in all attempts.
        info: the environment's numbers; of a name that several turns give the last counts. Of a
            program what is counted of its requests, and its own metrics.
        sampled_tokens: of all turns; untrained_tokens: of those that are not trained on, where
            there are any.
        discarded_tokens: sampled beside those, in attempts that failed and by branches, where
            there are any.
        paid: what the environment gave in all, 0 where the episode failed; reward: the sum over the
            episode's rows, which it is to be but for `agent.overflow_reward`.
        masked: none of its tokens is trained on.
    """
    replies = [turn.reply for turn in episode.turns if turn.reply]
    played = [turn for turn in episode.turns if not turn.writes]
    last_reply = played[-1].reply if played else None
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
    info |= program_numbers(episode, info)
    first_messages = episode.initial_messages
    facts = {
        "observation": observation,
        "done": done,
        "ending": episode.ending,
        "error": episode.first_error,
        "environment": episode.spec,
        "group": episode.group,
        "sample": episode.sample,
        "begins": digest(first_messages) if first_messages else "",
        "turns": len(played),
        "attempts": episode.attempt + 1,
        "cut_turns": sum(1 for turn in played if turn.finish_reason == "length"),
        "cut_observations": sum(1 for reply in replies if is_cut(reply)),
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
    discarded = discarded_tokens(episode)
    if discarded:
        facts["discarded_tokens"] = discarded
    untrained = sum(turn.tokens for turn in episode.turns if not turn.is_trained)
    if untrained:
        facts["untrained_tokens"] = untrained
    return facts


def discarded_tokens(episode: Episode) -> int:
    """Counts what was sampled for an episode beside its turns: by attempts before, and branches."""
    tokens = 0
    for attempt in episode.failed_attempts:
        tokens += sum(turn.tokens for turn in own_turns(episode, attempt.turns))
    for branch in episode.branches:
        tokens += sum(turn.tokens for turn in own_turns(branch, branch.turns))
        tokens += discarded_tokens(branch)
    return tokens


def own_turns(episode: Episode, turns: Sequence[Turn]) -> Sequence[Turn]:
    """Lists those of an attempt's turns that it sampled itself: a branch takes the first ones."""
    if episode.begin is None:
        return turns
    return turns[episode.begin.turn :]


def program_numbers(episode: Episode, info: Mapping[str, float]) -> dict[str, float]:
    """Returns what is counted of a program's requests, and its own metrics under other names."""
    counts = {}
    for name, count in episode.program.get("counts", {}).items():
        counts[f"program_{name}"] = float(count)
    metrics = episode.program.get("metrics", {})
    return counts | keep_own(metrics, counts.keys() | info.keys(), "a program's metrics")


def is_cut(reply: StepReply) -> bool:
    """Returns whether a reply's text has the mark of what was left out."""
    return any(LEFT_OUT in message["content"] for message in reply.messages)


def reward_paid(episode: Episode) -> float:
    """Sums what the environment gave, whatever the rows hold.

    An episode's own reward is in the place of those of its turns, but not of what the environment
    asked the policy and paid for itself.
    """
    if episode.ending in FAILURES:
        return 0.0
    of_turns = 0.0
    of_asides = 0.0
    for turn in episode.turns:
        reward = (turn.reply.reward if turn.reply else None) or 0.0
        if turn.aside:
            of_asides += reward
        else:
            of_turns += reward
    if episode.final_reward is not None:
        of_turns = episode.final_reward
    return of_turns + of_asides
