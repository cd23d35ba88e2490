"""A curriculum: environments whose success is neither certain nor hopeless get more episodes.

python main.py CONFIG.yaml agent.suite.path=examples/curriculum.py agent.suite.name=SuccessCurriculum
"""

from collections.abc import Mapping, Sequence
from typing import Any

from custom.env_suite import EnvironmentSuite

# A reward of at least this is a success.
SUCCESS = 0.5
# Of the newest step in the running success rate; the share that every environment keeps.
RATE, LEAST = 0.2, 0.1


class SuccessCurriculum(EnvironmentSuite):
    """Weighs each environment by p (1 - p), p its running success rate: the variance of what its groups are told."""

    def __init__(self, names: Sequence[str], weights: Sequence[float]) -> None:
        super().__init__(names, weights)
        self.own = list(self.weights)
        self.success = dict.fromkeys(self.names, 0.5)

    def update(self, rewards: Mapping[str, Sequence[float]]) -> None:
        """Moves the success rates, and sets the weights by them."""
        for name, values in rewards.items():
            seen = sum(value >= SUCCESS for value in values) / len(values)
            self.success[name] += RATE * (seen - self.success[name])
        self._weigh()

    def _weigh(self) -> None:
        rates = [self.success[name] for name in self.names]
        self.weights = [own * (LEAST + p * (1 - p)) for own, p in zip(self.own, rates, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Returns the success rates, from which the weights follow."""
        return {"success": self.success}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the success rates of environments that are still there."""
        self.success |= {
            name: rate for name, rate in state["success"].items() if name in self.success
        }
        self._weigh()
