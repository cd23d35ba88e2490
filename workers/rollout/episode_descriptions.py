"""Descriptions of the episodes that are to be played: the rows that the driver sends to engines.

A description is a row of a DataProto: who plays (`agent_index`), with which seed (`env_seed`) and
`task`, as which sample of which group. Invariant: the members of a group face the same task.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from custom.env_suite import EnvironmentSuite
from data.array_ops import object_array
from data.learning_sampler import GivenTask
from data.protocol import DataProto
from data.seeds import sample_ids, seed_beside, seed_for
from training.batch.row_groups import rows_by_key


def describe_episodes(
    groups: int,
    samples: int,
    info: dict[str, Any],
    *,
    first_group: int = 0,
    suite: EnvironmentSuite | None = None,
    tasks: Sequence[dict[str, Any]] = (),
    given: Sequence[GivenTask] = (),
) -> DataProto:
    """Describes `groups` x `samples` episodes to play, a row each.

    Args:
        info: what `step_info` makes; the batch's meta_info.
        first_group: the number of the first group in the step.
        suite: chooses who plays group g; None: there is one environment.
        tasks: what `reset` is given beside the seed, for each group; an empty one is no task.
        given: for each group the seed and the environment, where somebody else chose them.

    Validation's tasks are the same at every step, and not those of training; there each environment
    has its turn.
    """
    suite = suite or EnvironmentSuite(["environment"], [1.0])
    numbers = range(first_group, first_group + groups)
    step = info["global_steps"]
    run_seed = info["seed"]
    if info["validate"]:
        seeds = [seed_for(run_seed, 0, -1 - group) for group in numbers]
        chosen = suite.in_turn(numbers)
    else:
        seeds = [seed_for(run_seed, step, group) for group in numbers]
        # The first group's environment is reset with that group's seed itself.
        seed_of_mix = seed_beside(seed_for(run_seed, step, first_group), "suite")
        chosen = suite.choose(numbers, seed_of_mix)
    for number, task in enumerate(given):
        seeds[number] = seeds[number] if task.seed is None else task.seed
        chosen[number] = chosen[number] if task.environment is None else task.environment
    agents = np.repeat(np.array(chosen, dtype=np.int64), samples)  # (B,)
    columns = sample_ids(numbers, samples, step=step, validate=info["validate"])
    columns["agent_index"] = agents
    columns["env_seed"] = np.repeat(np.array(seeds, dtype=np.int64), samples)
    if any(tasks):
        columns["task"] = object_array([task for task in tasks for _ in range(samples)])
    columns["data_source"] = object_array([suite.names[index] for index in agents])
    return DataProto.from_dict(
        tensors={"agent": torch.tensor(agents)}, non_tensors=columns, meta_info=info
    )


def by_group(described: DataProto) -> Iterator[DataProto]:
    """Cuts described prompts or episodes by `uid`.

    meta_info then has the group's `uid`, and how many `episodes` it has.
    """
    for uid, rows in rows_by_key(described.non_tensor_batch["uid"].tolist()).items():
        meta_info = described.meta_info | {"uid": uid, "episodes": len(rows)}
        yield replace(described.select_idxs(rows), meta_info=meta_info)
