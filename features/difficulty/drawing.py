"""Draws the tasks of a step from their pools.

    places of a step    explore of them: tasks that are not apt          (hard, easy, failing)
                        the others:      tasks that are apt, or not known (apt, new)

Within a part every task is as likely as any other. A row or a seed comes once a step as long as
there are tasks that have not come: where the apt and new ones are fewer than their places, others
have the rest. A step full of two tasks would unlearn all others. Levels alone have a fresh seed in
each group, and come as often as their part has places. Invariant: a task comes a second time only
once all others of its part have come as often, those drawn before and not told of yet counted.
"""

from __future__ import annotations

import numpy as np

from features.difficulty.memory import APT, NEW


def draw_tasks(
    pools: np.ndarray,
    places: int,
    explore: float,
    pending: np.ndarray,
    generator: np.random.Generator,
    *,
    may_repeat: bool = False,
) -> list[int]:
    """Draws a task for each place.

    Args:
        pools: (tasks,) int64, the number of each task's pool.
        places: groups that are to play.
        explore: share of the places whose tasks are not apt, kept on average over steps.
        pending: (tasks,) int64, how often each task is drawn already and not told of.
        may_repeat: a task that comes again in the step is another one, as it has another seed.
    Returns:
        numbers of tasks, in the order in which they are to play.
    """
    is_wanted = (pools == APT) | (pools == NEW)
    wanted = np.flatnonzero(is_wanted)
    others = np.flatnonzero(~is_wanted)
    # A share of 2.3 places is 2 of them or 3, in seven steps of ten and in three.
    explored = int(places * explore + generator.random())
    if not may_repeat:
        # With fewer tasks than places all come once before any comes twice.
        rounds = -(-places // len(pools))
        explored = max(explored, places - rounds * len(wanted))
    if not len(others):
        explored = 0
    if not len(wanted):
        explored = places
    drawn = [
        *pick(wanted, places - explored, pending, generator),
        *pick(others, explored, pending, generator),
    ]
    return [drawn[place] for place in generator.permutation(places)]


def pick(
    candidates: np.ndarray, places: int, pending: np.ndarray, generator: np.random.Generator
) -> list[int]:
    """Picks candidates for so many places, at random among those that were drawn least."""
    times = pending[candidates]
    picked: list[int] = []
    while len(picked) < places:
        order = np.lexsort((generator.random(len(candidates)), times))
        # Those that come now have come as often as those that come next.
        least = order[: np.count_nonzero(times == times.min())]
        chosen = least[: places - len(picked)]
        times[chosen] += 1
        picked += candidates[chosen].tolist()
    return picked
