"""Derives every seed of a run, and makes the columns and meta_info that seeds are made of."""

import hashlib
from typing import Any

import numpy as np

from data.array_ops import object_array


def seed_for(
    run: int,
    step: int,
    group: int,
    sample: int | None = None,
    turn: int | None = None,
    branch: str | None = None,
) -> int:
    """Derives a seed in [0, 2**31), the same in every process, machine and Python version.

    Args:
        run: the run's own seed (`data.seed`).
        step: the training step.
        group: the prompt group within the step, counted in data order.
        sample: the sample within the group; left out, all samples of the group share the seed.
        turn: the turn within the episode.
        branch: the word of a branch of the episode, where it is one; it changes no other seed.

    The environment is reset with `seed_for(run, step, group)`, so that a group's samples face the
    same task; the sampler of a turn uses `seed_for(run, step, group, sample, turn)`, so that they
    answer it differently.
    """
    words = []
    for number in (run, step, group, sample, turn):
        words.append("-" if number is None else str(int(number)))
    if branch is not None:
        words.append(branch)
    digest = hashlib.sha256("/".join(words).encode()).digest()
    return int.from_bytes(digest[:4], "big") % 2**31


def seed_beside(seed: int, purpose: str) -> int:
    """Derives the seed of what draws for or beside an environment that was reset with `seed`.

    Generators with equal seeds draw equal numbers. A player, an opponent or a mix that was seeded
    as the environment is would repeat the environment's own draws, and so know its secret.

    Args:
        purpose: names who draws; each has numbers of its own.
    Returns:
        a number in [0, 2**31).
    """
    digest = hashlib.sha256(f"{purpose}/{seed}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 2**31


def sample_ids(
    groups: range, samples: int, *, step: int, validate: bool = False
) -> dict[str, np.ndarray]:
    """Makes the columns of groups x samples rows, a group's samples side by side.

    Returns:
        uid and episode_id, objects; group_index and sample_index, int64, which seed sampling; each
        (rows,).
    """
    prefix = "val." if validate else ""
    uids = []
    episode_ids = []
    group_numbers = []
    sample_numbers = []
    for group in groups:
        for sample in range(samples):
            uids.append(f"{prefix}{step}.{group}")
            episode_ids.append(f"{prefix}{step}.{group}.{sample}")
            group_numbers.append(group)
            sample_numbers.append(sample)
    return {
        "uid": object_array(uids),
        "episode_id": object_array(episode_ids),
        "group_index": np.array(group_numbers, dtype=np.int64),
        "sample_index": np.array(sample_numbers, dtype=np.int64),
    }


def step_info(
    *, step: int, seed: int, seeded: bool = False, validate: bool = False
) -> dict[str, Any]:
    """Makes the meta_info of a batch that is to be generated.

    Args:
        seed: of the run.
        seeded: turns go in lockstep, so that the same seeds give the same batches.
    """
    return {"global_steps": step, "seed": seed, "seeded": seeded, "validate": validate}
