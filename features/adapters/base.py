"""The parts that adapters share: a prompt template, an episode's end, the game to close.

Invariant: an adapter's first observation is its prompt template, filled (a str.format template that
`prompt_template` replaces), and what it cannot read as an action is answered by an observation that
says so, never by an exception.
"""

import random
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, TypeAlias

from custom.env import BaseEnvironment, Observation

# The observation, the reward, whether the episode is done, and info.
Step: TypeAlias = tuple[Observation, float, bool, dict[str, Any]]


class Adapter(BaseEnvironment):
    """Plays an environment of a library: write `start` and `play`.

    Args:
        name: of the environment, in its library.
        settings: the keyword arguments that all adapters have (`prompt_template`), and those that
            are the library's.
    """

    # The prompt where the config gives none, and what an episode that has ended answers.
    TEMPLATE = "{observation}"
    OVER = "The game is over."
    # The library's, if it has one to close.
    game: Any = None

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.name = name
        self.settings = dict(settings)
        self.prompt_template = self.settings.pop("prompt_template", self.TEMPLATE)

    @abstractmethod
    def start(self, seed: int) -> Observation:
        """Starts the seed's episode and returns the first observation."""

    @abstractmethod
    def play(self, action: str) -> Step:
        """Plays an action of an episode that goes on."""

    def reset(self, seed: int | None = None) -> Observation:
        """Starts the seed's episode, or one drawn at random, and returns the first observation."""
        if seed is None:
            seed = random.SystemRandom().randrange(2**31)
        first = self.start(seed)
        self._done = False
        return first

    def step(self, action: str) -> Step:
        """Plays an action; an episode that has ended stays as it is."""
        if self._done:
            return self.OVER, 0.0, True, {"valid": False}
        observation, reward, self._done, info = self.play(action)
        return observation, reward, self._done, info

    def close(self) -> None:
        """Closes the game."""
        super().close()
        if self.game is not None:
            self.game.close()
            self.game = None

    def fill_prompt(self, **fields: str) -> str:
        """Fills the prompt template with these fields and the environment's name."""
        return self.prompt_template.format(name=self.name, **fields)
