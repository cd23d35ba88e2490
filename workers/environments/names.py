"""Names environments in messages and metrics, and makes the error that lists some."""

from typing import Any


class CannotBuild(ValueError):
    """Lists the environments that cannot be built, and why: one problem each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def environment_source(source: Any) -> str:
    """Returns where an environment comes from, for errors: FILE.py:CLASS, or its name."""
    return source if isinstance(source, str) else environment_name(source)


def environment_name(source: Any) -> str:
    """Returns what messages and metrics call an environment.

    Such as textarena:GuessTheNumber-v0, or the name of a class, also of one that is in a file.
    """
    if not isinstance(source, str):
        return getattr(source, "__name__", type(source).__name__)
    module, _, _ = source.partition(":")
    if module.endswith(".py"):
        return source.rsplit(":", 1)[-1]
    return source
