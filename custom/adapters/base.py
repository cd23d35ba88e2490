"""From a name in a config to an environment, and what adapters share: libraries, a prompt template, an episode's end.

Invariant: an adapter's first observation is its prompt template, filled (a str.format template that `prompt_template`
replaces), and what it cannot read as an action is answered by an observation that says so, never by an exception.
What does not exist or takes other arguments raises a ValueError that says what is allowed; an exception inside a user's
own environment keeps its type.
"""

import importlib
import inspect
import random
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from custom.env import BaseEnvironment, Observation
from data.loading import load_object


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
        """Fills the prompt template with these fields and the environment's name."""
        return self.prompt_template.format(name=self.name, **fields)


def make_environment(source: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
    """Makes an environment from its description.

    Args:
        source: "gymnasium:ID", "reasoning_gym:NAME", "textarena:ID", "textworld:NAME", "verifiers:NAME",
            "package.module:Class", "/path/file.py:Class", a class, or a function that returns an environment.
        kwargs: arguments by name; for a class that is built from a config alone, the fields of its `config_cls`.
    Raises: ValueError for what does not exist, and for arguments that it does not take.
    """
    kwargs = dict(kwargs or {})
    if not isinstance(source, str):
        return _construct(source, kwargs)
    kind, _, name = source.rpartition(":")
    if not kind or not name:
        raise ValueError(
            f"environment {source!r} is unknown; allowed: {ENVIRONMENT_NAMES} or /path/to/file.py:CLASS"
        )
    if library := library_of(source):
        about = LIBRARIES[library]
        try:
            importlib.import_module(library)
            adapter = load_object(f"custom.adapters.{library}:{about.adapter}", "environment")
        except ImportError as error:
            raise ValueError(
                f"environment {source} needs the package: pip install {about.package}"
            ) from error
        try:
            return adapter(source.partition(":")[2], **kwargs)
        except FileNotFoundError:
            raise
        # Each library raises in its own way over what it lacks.
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            raise ValueError(f"{source} cannot be made with {kwargs}: {why}") from error
    return _construct(load_object(source, "environment"), kwargs)


def _construct(make: Any, kwargs: dict[str, Any]) -> Any:
    if not callable(make):
        raise ValueError(
            f"an environment is made from a class or a function, not from a {type(make).__name__}"
        )
    if not kwargs:
        return make()
    taking = taker_of(make, kwargs)
    return make(**kwargs) if taking is make else make(taking(**kwargs))


def taker_of(make: Any, kwargs: Mapping[str, Any]) -> Any:
    """Returns what takes the arguments, a class that is built from a config alone or its config; else ValueError."""
    parameters = list(inspect.signature(make).parameters)
    by_config = isinstance(make, type) and parameters == ["config"] and "config" not in kwargs
    taking = make.config_cls if by_config else make
    try:
        inspect.signature(taking).bind(**kwargs)
    except TypeError as error:
        raise ValueError(
            f"{make.__name__} takes {inspect.signature(taking)}, not {sorted(kwargs)}: {error}"
        ) from error
    return taking
