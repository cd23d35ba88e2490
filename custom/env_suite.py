"""A mix of environments: which one plays each group of a step, by weights that may change.

Invariant: the choice follows from weights, seed and the groups' numbers, so that a resumed run,
whose checkpoint holds the weights, chooses as it would have chosen.
"""

import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import Any


class EnvironmentSuite:
    """Shares a step's groups out among environments, by weights.

    To change the weights while training goes on, subclass it and name the subclass as
    `agent.suite`; examples/curriculum.py does.

    Args:
        names: of the environments, all different, as metrics call them.
        weights: shares of the groups, relative to each other; all equal: in turn.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[float]) -> None:
        self.names = list(names)
        self.weights = [float(weight) for weight in weights]

    def update(self, rewards: Mapping[str, Sequence[float]]) -> None:
        """Sees the rewards of a step's episodes by environment, and may change `weights`.

        It does nothing, and is made to be overridden.
        """

    def choose(self, groups: range, seed: int) -> list[int]:
        """Returns the environment's index for each group.

        How often an index occurs is within one of what the weights say.
        """
        self._check_weights()
        if len(set(self.weights)) == 1:
            return self.in_turn(groups)
        # A line has a segment for each environment, as long as its weight, and a point for each
        # group: equally spaced, with a random start. The segment decides who plays the group.
        segment_ends = list(accumulate(self.weights))
        total = segment_ends[-1]
        last = len(segment_ends) - 1
        shift = random.Random(seed).random()
        indices = []
        for number in range(len(groups)):
            point = (number + shift) / len(groups) * total
            # Rounding may put a point on the line's very end.
            indices.append(min(bisect_right(segment_ends, point), last))
        return indices

    def _check_weights(self) -> None:
        are_finite = all(0 <= weight < inf for weight in self.weights)
        if len(self.weights) != len(self.names) or not are_finite:
            raise ValueError(
                f"{type(self).__name__}.weights={self.weights}; allowed: a finite number, 0 or "
                f"more, for each of {', '.join(self.names)}"
            )

    def in_turn(self, groups: range) -> list[int]:
        """Returns the indices in turn."""
        return [group % len(self.names) for group in groups]

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: values that JSON can hold."""
        return {"weights": dict(zip(self.names, self.weights, strict=True))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a checkpoint's weights, those of environments that are still there."""
        saved_weights = state["weights"]
        for index, name in enumerate(self.names):
            if name in saved_weights:
                self.weights[index] = float(saved_weights[name])
