"""What adapters share: the table of libraries that have one, a name, and a prompt template.

Invariant: an adapter's first observation is its prompt template, filled (a str.format template that `prompt_template`
replaces), and what it cannot read as an action is answered by an observation that says so, never by an exception.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from custom.env import BaseEnvironment


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
    "verifiers": Library("verifiers", "VerifiersEnvironment", network=True),
}
ENVIRONMENT_NAMES = ", ".join([f"{library}:…" for library in LIBRARIES] + ["PACKAGE.MODULE:CLASS"])

Step = tuple[str, float, bool, dict[str, Any]]


def library_of(source: Any) -> str | None:
    """Returns the library behind an environment named LIBRARY:ID, or None."""
    library = source.partition(":")[0] if isinstance(source, str) else None
    return library if library in LIBRARIES else None


@contextmanager
def making(name: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Makes what a library raises in the block, each in its own way over what it lacks, a ValueError of one line."""
    try:
        yield
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(f"{name} cannot be made with {dict(settings)}: {why}") from error


class Adapter(BaseEnvironment):
    """Plays an environment of a library, under a name and with a prompt template.

    Args:
        name: of the environment, in its library.
        settings: the keyword arguments that all adapters have (`prompt_template`), and those that are the library's.
    """

    TEMPLATE = "{observation}"

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.name, self.settings = name, dict(settings)
        self.prompt_template = self.settings.pop("prompt_template", self.TEMPLATE)

    def fill_prompt(self, **fields: str) -> str:
        """Fills the prompt template with these fields and the environment's name; ValueError names the fields."""
        fields = {"name": self.name, **fields}
        try:
            return self.prompt_template.format(**fields)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            allowed = f"its fields: {', '.join(f'{{{name}}}' for name in fields)}. Write {{{{ and }}}} for braces"
            given = f"prompt_template={self.prompt_template!r} cannot be filled ({error!r})"
            raise ValueError(f"{given}; {allowed}") from error
