"""DAPO's dynamic sampling (arXiv:2503.14476, section 3.2): groups whose members all have the same reward are replaced.

Invariant: such groups, which teach nothing, never enter the batch of a step; a group enters whole.
"""

from collections.abc import Iterator

import numpy as np

from data.names import unknown_name
from data.protocol import DataProto
from data.texts import say
from training.batch.episode_rows import EpisodeRows
from training.config import FilterGroupsConfig

SUM_OF_REWARDS = ("seq_reward", "score")
# What columns of the reward function's other values begin with.
REWARD_INFO = "reward_info/"


def collect_varied_groups(
    batches: Iterator[DataProto], settings: FilterGroupsConfig, wanted: int
) -> tuple[DataProto, dict[str, float]]:
    """Draws batches until `wanted` groups differ within themselves, `max_num_gen_batches` at most (0: without end).

    Args:
        batches: scored batches of whole groups, made as they are drawn.
        wanted: groups of a step.
    Returns:
        the first `wanted` groups that vary, fewer where the bound was met; and metrics: batches drawn, groups dropped.
    Raises:
        ValueError: no group at all varies.
    """
    kept: list[DataProto] = []
    found = drawn = dropped = 0
    while found < wanted and not 0 < settings.max_num_gen_batches <= drawn:
        batch, drawn = next(batches), drawn + 1
        varied, uniform = varied_groups(batch, settings.metric)
        take = set(varied[: wanted - found])
        found, dropped = found + len(take), dropped + uniform
        if take:
            kept.append(batch.select_idxs(np.array([uid in take for uid in batch.non_tensor_batch["uid"]])))
    if not kept:
        raise ValueError(say("nothing_varies", drawn=drawn, metric=settings.metric))
    return DataProto.concat(kept), {"filter_groups/batches": float(drawn), "filter_groups/dropped": float(dropped)}


def varied_groups(batch: DataProto, metric: str) -> tuple[list[str], int]:
    """Lists the uids of groups whose episodes differ in `metric`, in order, and counts the groups that do not.

    Masked episodes do not count.
    """
    episodes = EpisodeRows(batch)
    live = (episodes.lengths > 0).tolist()
    values: dict[str, set[float]] = {}
    for row, value, counts in zip(episodes.first, _values(batch, episodes, metric), live, strict=True):
        seen = values.setdefault(str(batch.non_tensor_batch["uid"][row]), set())
        if counts:
            seen.add(value)
    varied = [uid for uid, seen in values.items() if len(seen) > 1]
    return varied, len(values) - len(varied)


def _values(batch: DataProto, episodes: EpisodeRows, metric: str) -> list[float]:
    if metric in SUM_OF_REWARDS:
        return episodes.totals(batch.batch["token_level_scores"]).float().tolist()
    column = batch.non_tensor_batch.get(REWARD_INFO + metric)
    if column is None:
        known = [name.removeprefix(REWARD_INFO) for name in batch.non_tensor_batch if name.startswith(REWARD_INFO)]
        raise unknown_name("algorithm.filter_groups.metric", metric, [*SUM_OF_REWARDS, *known])
    return [float(column[row]) for row in episodes.first]
