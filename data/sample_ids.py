"""Who is who among a step's rows: the names and numbers that group them, and the seeds that follow from them.

    uid "7.2": the third prompt of step 7      episode_id "7.2.0": its first sample      "val." in front: validation's

Invariant: they depend on (step, group, sample) alone, so that a resumed run gives the same;
`seed_for` is the one function from which every environment and sampling seed of a run derives.
"""

import hashlib
from typing import Any

import numpy as np

from data.containers import object_array


def sample_ids(groups: range, samples: int, *, step: int, validate: bool = False) -> dict[str, np.ndarray]:
    """Makes the columns of groups x samples rows, a group's samples side by side.

    Returns: uid and episode_id, objects; group_index and sample_index, int64, which seed sampling; each (rows,).
    """
    prefix = "val." if validate else ""
    rows = [(group, sample) for group in groups for sample in range(samples)]
    return {
        "uid": object_array([f"{prefix}{step}.{group}" for group, _ in rows]),
        "episode_id": object_array([f"{prefix}{step}.{group}.{sample}" for group, sample in rows]),
        "group_index": np.array([group for group, _ in rows], dtype=np.int64),
        "sample_index": np.array([sample for _, sample in rows], dtype=np.int64),
    }


def step_info(*, step: int, seed: int, seeded: bool = False, validate: bool = False) -> dict[str, Any]:
    """Makes the meta_info of a batch that is to be generated.

    Args:
        seed: of the run.
        seeded: turns go in lockstep, so that the same seeds give the same batches.
    """
    return {"global_steps": step, "seed": seed, "seeded": seeded, "validate": validate}


def seed_for(run: int, step: int, group: int, sample: int | None = None, turn: int | None = None) -> int:
    """Derives a seed in [0, 2**31), the same in every process, on every machine and in every Python version.

    Args:
        run: the run's own seed (`data.seed`).
        step: the training step.
        group: the prompt group within the step, counted in data order.
        sample: the sample within the group; left out, all samples of the group share the seed.
        turn: the turn within the episode.

    The environment is reset with `seed_for(run, step, group)`, so that a group's samples face the same task;
    the sampler of a turn uses `seed_for(run, step, group, sample, turn)`, so that they answer it differently.
    """
    name = "/".join("-" if part is None else str(int(part)) for part in (run, step, group, sample, turn))
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 2**31
