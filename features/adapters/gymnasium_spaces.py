"""gymnasium's spaces as text: observations that are written down, actions that have names.

Invariant: what cannot be written as text raises a ValueError that says what is allowed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# A row of more numbers is not written as text, nor is a grid of more.
LARGEST_BOX = 64
LARGEST_GRID = 1024


@dataclass(frozen=True)
class ActionNames:
    """Holds the actions of a game as a player writes them.

    Attributes:
        names: what each number is called; empty: it has no name.
        numbers: the number of each thing that the player may write, numbers included.
        any_text: actions are text, and the others are empty.
    """

    names: dict[int, str]
    numbers: dict[str, int]
    any_text: bool = False


def name_actions(space: Any, given_names: Sequence[str]) -> ActionNames:
    """Names the actions of a Discrete or Text space, in order; ValueError for other spaces."""
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        return ActionNames({}, {}, any_text=True)
    if not isinstance(space, spaces.Discrete):
        raise ValueError(f"it has the action space {space}; allowed: Discrete or Text")
    numbers = range(int(space.start), int(space.start + space.n))
    by_name: dict[str, int] = {}
    for name, number in zip(given_names, numbers, strict=False):
        by_name[str(name).lower()] = number
    # Names that are alike, or too many of them.
    if len(by_name) != len(given_names):
        raise ValueError(
            f"action_names={given_names!r}; allowed: different names, at most one for each of the "
            f"numbers {numbers[0]} to {numbers[-1]}"
        )
    names = dict.fromkeys(numbers, "")
    for name, number in by_name.items():
        names[number] = name
    by_digits = {str(number): number for number in numbers}
    return ActionNames(names, by_digits | by_name)


def space_to_text(space: Any, value: Any, names: Sequence[str] = ()) -> str:
    """Writes an observation of a gymnasium space as text.

    Args:
        space: the space.
        value: the observation.
        names: of the parts of a Tuple or of a row of numbers: "position: 0.5, velocity: -0.07".
    Raises:
        ValueError: what cannot be written, such as images.
    """
    from gymnasium import spaces

    # Libraries have spaces of their own for texts, such as MiniGrid's missions.
    if isinstance(space, spaces.Text) or isinstance(value, str):
        return str(value)
    if isinstance(space, spaces.Tuple):
        pairs = zip(space.spaces, value, strict=True)
        return _join_named([space_to_text(part, entry) for part, entry in pairs], names)
    if isinstance(space, spaces.Dict):
        lines = [f"{key}: {space_to_text(part, value[key])}" for key, part in space.spaces.items()]
        return "\n".join(lines)
    countable = spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    if isinstance(space, countable) and int(np.prod(space.shape)) <= LARGEST_BOX:
        return _numbers_to_text(np.asarray(value), names)
    if isinstance(space, countable) and _is_grid(space.shape):
        return _grid_to_text(np.asarray(value))
    raise ValueError(
        f"observations of {space} cannot be written down; allowed: Discrete, Text, Tuple, Dict, "
        f"up to {LARGEST_BOX} numbers, and grids of up to {LARGEST_GRID}. Wrap the game in an "
        "environment of your own that describes them"
    )


def _numbers_to_text(numbers: np.ndarray, names: Sequence[str]) -> str:
    if names and numbers.ndim == 1:
        return _join_named([_number_to_text(number) for number in numbers], names)
    return np.array2string(
        numbers, formatter={"all": _number_to_text}, separator=", ", max_line_width=200
    )


def _is_grid(shape: tuple[int, ...]) -> bool:
    """Checks whether numbers are cells in rows, each one number or a few (channels)."""
    return len(shape) in (2, 3) and int(np.prod(shape)) <= LARGEST_GRID


def _grid_to_text(grid: np.ndarray) -> str:
    """Writes a line a row, its cells side by side: "1 0 2", or of several numbers "2/5/0 1/0/0"."""
    lines = []
    for row in grid:
        cells = ["/".join(map(_number_to_text, np.atleast_1d(cell))) for cell in row]
        lines.append(" ".join(cells))
    return "\n".join(lines)


def _join_named(parts: list[str], names: Sequence[str]) -> str:
    """Writes a name before each part, as far as there are names."""
    named = [f"{name}: {part}" for name, part in zip(names, parts, strict=False)]
    return ", ".join(named + parts[len(names) :])


def _number_to_text(number: Any) -> str:
    """Writes a number with two decimals, one between -1 and 1 with four, no zeros at the end."""
    decimals = 4 if abs(number) < 1 else 2
    # Adding 0 makes -0 a 0.
    return f"{round(float(number), decimals) + 0.0:.15g}"
