"""What adapters share: the table of libraries that have one, a name, a prompt template, and how an episode ends.

Invariant: an adapter's first observation is its prompt template, filled (a str.format template that `prompt_template`
replaces), and what it cannot read as an action is answered by an observation that says so, never by an exception.
"""

import random
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from custom.env import BaseEnvironment, Observation


class Library(NamedTuple):
    """Describes a library whose environments a config names as LIBRARY:ID.

    Attributes:
        package: what to install for it.
        adapter: the class in the module of custom/adapters that is named like the library.
        own_process: its environments live in processes of their own unless the config says otherwise: they execute the
            policy's text, draw from global generators, or hang.
        network: those processes keep the network.
    """

    package: str
    adapter: str
    own_process: bool = True
    network: bool = False


LIBRARIES = {
    "gymnasium": Library("gymnasium", "GymnasiumEnvironment", own_process=False),
    "reasoning_gym": Library("reasoning-gym", "ReasoningGymEnvironment"),
    "textarena": Library("textarena", "TextArenaEnvironment"),
    "textworld": Library("textworld", "TextWorldEnvironment"),
    "verifiers": Library("'verifiers>=0.4'", "VerifiersEnvironment", network=True),
}
ENVIRONMENT_NAMES = ", ".join([f"{library}:…" for library in LIBRARIES] + ["PACKAGE.MODULE:CLASS"])

Step: TypeAlias = tuple[Observation, float, bool, dict[str, Any]]


def library_of(source: Any) -> str | None:
    """Returns the library behind an environment named LIBRARY:ID, or None."""
    library = source.partition(":")[0] if isinstance(source, str) else None
    return library if library in LIBRARIES else None


class Adapter(BaseEnvironment):
    """Plays an environment of a library, under a name and with a prompt template: write `start` and `play`.

    Args:
        name: of the environment, in its library.
        settings: the keyword arguments that all adapters have (`prompt_template`), and those that are the library's.
    """

    TEMPLATE, OVER = "{observation}", "The game is over."
    # The library's, if it has one to close.
    game: Any = None

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.name, self.settings = name, dict(settings)
        self.prompt_template = self.settings.pop("prompt_template", self.TEMPLATE)

    @abstractmethod
    def start(self, seed: int) -> Observation:
        """Starts the seed's episode and returns the first observation."""

    @abstractmethod
    def play(self, action: str) -> Step:
        """Plays an action of an episode that goes on."""

    def reset(self, seed: int | None = None) -> Observation:
        """Starts the seed's episode, or one drawn at random, and returns the first observation."""
        first = self.start(random.SystemRandom().randrange(2**31) if seed is None else seed)
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
        """Fills the prompt template with these fields and the environment's name; ValueError names the fields."""
        fields = {"name": self.name, **fields}
        try:
            return self.prompt_template.format(**fields)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            allowed = f"its fields: {', '.join(f'{{{name}}}' for name in fields)}. Write {{{{ and }}}} for braces"
            given = f"prompt_template={self.prompt_template!r} cannot be filled ({error!r})"
            raise ValueError(f"{given}; {allowed}") from error
