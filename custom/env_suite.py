"""A mix of environments: who plays each group of a step, by weights that a sampler of one's own may change.

Invariant: the choice follows from weights, seed and the groups' numbers, so that a resumed run, whose checkpoint holds
the weights, chooses as it would have chosen.
"""

import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import Any


class EnvironmentSuite:
    """Shares a step's groups out among environments; subclass it, and name it as `agent.suite`, to change the weights.

    Args:
        names: of the environments, all different, as metrics call them.
        weights: shares of the groups, relative to each other; all equal: in turn.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[float]) -> None:
        self.names, self.weights = list(names), [float(weight) for weight in weights]

    def update(self, rewards: Mapping[str, Sequence[float]]) -> None:
        """Sees the rewards of a step's episodes by environment, and may change `weights`; made to be overridden."""

    def choose(self, groups: range, seed: int) -> list[int]:
        """Returns the environment's index for each group; counts are within one of what the weights say."""
        if len(self.weights) != len(self.names) or not all(
            0 <= weight < inf for weight in self.weights
        ):
            allowed = f"a finite number, 0 or more, for each of {', '.join(self.names)}"
            raise ValueError(f"{type(self).__name__}.weights={self.weights}; allowed: {allowed}")
        if len(set(self.weights)) == 1:
            return self.in_turn(groups)
        bounds = list(accumulate(self.weights))
        shift = random.Random(seed).random()
        places = [(number + shift) / len(groups) * bounds[-1] for number in range(len(groups))]
        return [min(bisect_right(bounds, place), len(bounds) - 1) for place in places]

    def in_turn(self, groups: range) -> list[int]:
        """Returns the indices in turn."""
        return [group % len(self.names) for group in groups]

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps, as JSON holds it."""
        return {"weights": dict(zip(self.names, self.weights, strict=True))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a checkpoint's weights over, those of environments that are still there."""
        kept = dict(zip(self.names, self.weights, strict=True)) | state["weights"]
        self.weights = [float(kept[name]) for name in self.names]
