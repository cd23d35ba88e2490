"""A curriculum: environments whose success is neither certain nor hopeless get more episodes.

    python main.py CONFIG.yaml \\
        agent.suite.path=examples/curriculum.py agent.suite.name=SuccessCurriculum
"""

from collections.abc import Mapping, Sequence
from typing import Any

from custom.env_suite import EnvironmentSuite

# A reward of at least this is a success.
MIN_SUCCESS = 0.5
# Share of the newest step in the running success rate.
UPDATE_RATE = 0.2
# Every environment keeps this weight, however certain or hopeless it is.
MIN_WEIGHT = 0.1


class SuccessCurriculum(EnvironmentSuite):
    """Weighs each environment by p (1 - p), the variance of a success at its running rate p."""

    def __init__(self, names: Sequence[str], weights: Sequence[float]) -> None:
        super().__init__(names, weights)
        self.weights_of_config = list(self.weights)
        self.success = dict.fromkeys(self.names, 0.5)

    def update(self, rewards: Mapping[str, Sequence[float]]) -> None:
        """Moves the success rates, and sets the weights by them."""
        for name, values in rewards.items():
            successes = [value for value in values if value >= MIN_SUCCESS]
            rate = len(successes) / len(values)
            self.success[name] += UPDATE_RATE * (rate - self.success[name])
        self._set_weights()

    def _set_weights(self) -> None:
        for index, name in enumerate(self.names):
            p = self.success[name]
            self.weights[index] = self.weights_of_config[index] * (MIN_WEIGHT + p * (1 - p))

    def state_dict(self) -> dict[str, Any]:
        """Returns the success rates, from which the weights follow."""
        return {"success": self.success}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the success rates of environments that are still there."""
        for name, rate in state["success"].items():
            if name in self.success:
                self.success[name] = rate
        self._set_weights()
