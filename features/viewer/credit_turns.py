"""Makes the table of an episode's turns: reward, value, return, baseline and advantage of each.

Invariant: all are sums, means, counts or entries of recorded columns.
"""

from typing import Any

import numpy as np

from features.viewer.records import RecordedEpisode
from features.viewer.step_credit import StepCredit, state_deltas

SENTENCES = {
    "turn": "number of the turn, from 1 on",
    "tokens": "tokens of it that the loss took as sampled",
    "reward": "sum of token_level_rewards",
    "return": "`returns` at its first token",
    "value": "the critic's, before its first token",
    "delta": "sum of reward + gamma V_next - V over its tokens",
    "others": "mean of `returns` at this turn in the group's other episodes that reached it",
    "same state": "turns of the group that began in the same state, this one included",
    "advantage": "mean over its tokens, as recorded",
    "policy weight": "sum of minus d loss / d log-prob over its tokens",
}


def turn_table(
    columns: dict[str, np.ndarray],
    sampled: np.ndarray,
    credit: StepCredit,
    episode: RecordedEpisode,
) -> dict[str, Any] | None:
    """Returns the names of the table's columns, their sentences and its rows; None without turns.

    Args:
        columns: by name (T,), of all the episode's rows.
        sampled: (T,) bool.
    """
    if "turn_ids" not in columns or not sampled.any():
        return None
    turn_ids = np.where(sampled, columns["turn_ids"], -1)
    rewards = columns["token_level_rewards"]
    summed = {"reward": rewards, "advantage": columns["advantages"]}
    if "policy_weight" in columns:
        summed["policy weight"] = columns["policy_weight"]
    if "values" in columns:
        deltas = state_deltas(rewards, columns["values"], sampled, credit.algorithm.gamma)
        summed["delta"] = deltas
    block = np.array(list(summed.values()))
    rows = []
    for turn in sorted(one for one in set(turn_ids.tolist()) if one >= 0):
        places = np.flatnonzero(turn_ids == turn)
        row: dict[str, Any] = {"turn": turn + 1, "tokens": len(places)}
        # All sums of a turn at once: its tokens are few, and a call costs more than they do.
        sums = np.add.reduce(block.take(places, axis=1), axis=1, dtype=np.float64)
        row.update(zip(summed, sums.tolist(), strict=True))
        row["advantage"] /= len(places)
        row["return"] = float(columns["returns"][places[0]])
        if "values" in columns:
            row["value"] = float(columns["values"][places[0]])
        if credit.facts.compares == "turns":
            row["others"] = mean_of_others(credit, episode.episode_id, turn)
        if credit.facts.compares == "states" and credit.anchors:
            row["same state"] = turns_of_same_state(credit, episode.episode_id, turn)
        rows.append(row)
    # All turns have the same numbers.
    names = [name for name in SENTENCES if rows and name in rows[0]]
    return {
        "columns": [[name, SENTENCES[name]] for name in names],
        "rows": [[row[name] for name in names] for row in rows],
    }


def mean_of_others(credit: StepCredit, episode_id: str, turn: int) -> float | str:
    """Averages a turn's return over the group's other episodes that reached it."""
    place = credit.place_of_episode.get(episode_id)
    if place is None:
        return ""
    members = [member for member in credit.members_beside(place) if member != place]
    returns = [credit.return_of_turn(member, turn) for member in members]
    reached = [number for number in returns if number is not None]
    if not reached:
        return "none reached it"
    return float(np.mean(reached))


def turns_of_same_state(credit: StepCredit, episode_id: str, turn: int) -> int | str:
    """Counts the group's turns that began where this one did."""
    place = credit.place_of_episode.get(episode_id)
    states = credit.anchors.get(episode_id, [])
    if place is None or turn >= len(states):
        return ""
    members = [credit.name_of_episode(member) for member in credit.members_beside(place)]
    return sum(credit.anchors.get(name, []).count(states[turn]) for name in members)
