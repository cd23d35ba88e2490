"""Draws batches until a step has enough groups whose members have different rewards.

This is DAPO's dynamic sampling (arXiv:2503.14476, section 3.2): a group of equal rewards has no
advantage to learn from and is replaced. Invariant: a group enters whole or not at all.
"""

from collections.abc import Iterator

import numpy as np

from data.names import unknown_name
from data.protocol import DataProto
from training.batch.episode_rows import REWARD_INFO, EpisodeRows, group_keys
from training.batch.row_groups import rows_by_key
from training.config import FilterGroupsConfig

SUM_OF_REWARDS = ("seq_reward", "score")
# In a batch's meta_info: the episodes that were left out of it, and why.
DROPPED = "dropped_episodes"


def collect_varied_groups(
    batches: Iterator[DataProto], settings: FilterGroupsConfig, wanted: int
) -> tuple[DataProto, dict[str, float]]:
    """Draws batches until `wanted` groups vary, at most `max_num_gen_batches` (0: no limit).

    Args:
        batches: scored batches of whole groups, made as they are drawn.
        wanted: groups of a step.
    Returns:
        the first `wanted` groups that vary, fewer where the limit was met, with meta_info DROPPED;
        and metrics: batches drawn, groups dropped.
    Raises:
        ValueError: no group at all varies.
    """
    kept: list[DataProto] = []
    kept_groups = 0
    drawn = 0
    dropped = 0
    left_out: list[dict[str, str]] = []
    limit = settings.max_num_gen_batches
    while kept_groups < wanted and (limit == 0 or drawn < limit):
        batch = next(batches)
        drawn += 1
        varied, uniform = varied_groups(batch, settings.metric)
        dropped += uniform
        chosen = set(varied[: wanted - kept_groups])
        left_out += episodes_left_out(batch, chosen, set(varied))
        if chosen:
            rows = np.array([uid in chosen for uid in batch.non_tensor_batch["uid"]])
            kept.append(batch.select_idxs(rows))
            kept_groups += len(chosen)
    if not kept:
        raise ValueError(
            f"algorithm.filter_groups: in {drawn} batches no group had two different values of "
            f"{settings.metric!r}, so there is nothing to learn from; choose tasks of another "
            "difficulty, more samples (actor_rollout_ref.rollout.n), a finer reward, or switch "
            "it off"
        )
    metrics = {
        "filter_groups/batches": float(drawn),
        "filter_groups/dropped": float(dropped),
    }
    joined = DataProto.concat(kept)
    joined.meta_info[DROPPED] = left_out
    return joined, metrics


def episodes_left_out(batch: DataProto, chosen: set[str], varied: set[str]) -> list[dict[str, str]]:
    """Lists the episodes of groups that do not vary (filtered), or were not needed (surplus)."""
    ids = batch.non_tensor_batch.get("episode_id", np.arange(len(batch)))
    left_out: dict[str, dict[str, str]] = {}
    for uid, episode_id in zip(batch.non_tensor_batch["uid"], ids, strict=True):
        if uid not in chosen:
            why = "surplus" if uid in varied else "filtered"
            name = str(episode_id)
            left_out[name] = {"episode_id": name, "uid": str(uid), "why": why}
    return list(left_out.values())


def varied_groups(batch: DataProto, metric: str) -> tuple[list[str], int]:
    """Lists the uids of groups whose episodes differ in `metric`, and counts the other groups.

    Masked episodes do not count. Where a group has several roles, one that differs is enough.
    """
    episodes = EpisodeRows(batch)
    is_live = (episodes.lengths > 0).tolist()
    values = _values(batch, episodes, metric)
    uids = [str(uid) for uid in batch.non_tensor_batch["uid"][episodes.first]]
    keys = group_keys(batch)[episodes.first].tolist()
    # One entry a uid, in the order in which they come.
    varied: dict[str, bool] = dict.fromkeys(uids, False)
    for members in rows_by_key(keys).values():
        different = {values[member] for member in members if is_live[member]}
        if len(different) > 1:
            varied[uids[members[0]]] = True
    chosen = [uid for uid, does_vary in varied.items() if does_vary]
    return chosen, len(varied) - len(chosen)


def _values(batch: DataProto, episodes: EpisodeRows, metric: str) -> list[float]:
    """Reads each episode's value of the metric: (E,)."""
    if metric in SUM_OF_REWARDS:
        return episodes.totals(batch.batch["token_level_scores"]).float().tolist()
    if REWARD_INFO + metric not in batch.non_tensor_batch:
        infos = [name for name in batch.non_tensor_batch if name.startswith(REWARD_INFO)]
        known = [name.removeprefix(REWARD_INFO) for name in infos]
        allowed = [*SUM_OF_REWARDS, *known]
        raise unknown_name("algorithm.filter_groups.metric", metric, allowed)
    # None: the reward function said nothing of this episode.
    return [float(value or 0) for value in episodes.column(REWARD_INFO + metric)]
