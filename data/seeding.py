"""Seeds: the one function from which every environment and sampling seed of a run derives.

Invariant: a seed depends on names alone, not on the order of calls, so a resumed run has the seeds it would have had.
"""

import hashlib


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
