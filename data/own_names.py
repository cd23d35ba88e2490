"""Names that users choose, where they meet the trainer's own in one mapping.

    the trainer's   reward                       of an episode, in validation
    a user's        {"score": 1, "reward": 7}    of a reward function
    together        reward, score, own_reward

Invariant: the trainer's entry keeps its name and its value, and the user's is not lost: it is
called `own_NAME`, which a warning says once.
"""

from collections.abc import Container, Mapping
from typing import TypeVar

from data.warn_once import warn_first

OWN = "own_"

Value = TypeVar("Value")


def keep_own(own: Mapping[str, Value], taken: Container[str], whose: str) -> dict[str, Value]:
    """Returns a user's entries, those whose names are taken as `own_NAME`.

    Args:
        taken: the trainer's names.
        whose: what the entries are of, as the warning calls it.
    """
    kept = {}
    for name, value in own.items():
        free = name
        while free in taken or (free != name and free in own):
            free = OWN + free
        if free != name:
            warn_first(
                __name__,
                f"{whose} {name}",
                f"{whose} has {name!r}, which is a name of the trainer's own: it is kept as "
                f"{free!r}; give it another name",
            )
        kept[free] = value
    return kept
