"""MiniGrid's view of the player as text: the cells ahead as signs, and what lies in them by name.

    You stand at @ and look up. # wall, . empty, ? unseen.
    ? # # # ?
    ? # . D ?
    ? # @ . ?
    locked yellow door: 1 ahead, 1 right
    You carry nothing.

Invariant: the text says what the observation holds, all of it and nothing else.
"""

from typing import Any

import numpy as np

# The meaning of the three numbers of a cell.
OBJECTS = (
    "unseen",
    "empty",
    "wall",
    "floor",
    "door",
    "key",
    "ball",
    "box",
    "goal",
    "lava",
    "agent",
)
COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
DOORS = ("open", "closed", "locked")
# The meaning of the observation's direction.
FACING = ("east", "south", "west", "north")
# Objects that are told by a sign alone; the others by their first letter, in capitals (X: a box).
SIGNS = {"unseen": "?", "empty": ".", "wall": "#", "floor": ".", "box": "X"}
LEGEND = "You stand at @ and look up. # wall, . empty, ? unseen."


def draw_view(env: Any) -> str:
    """Draws what an unwrapped MiniGrid environment shows its player, and names the mission."""
    observation = env.gen_obs()
    facing = FACING[int(observation["direction"])]
    return f"{observation['mission']}\nYou face {facing}.\n{draw_image(observation['image'])}"


def draw_image(image: np.ndarray) -> str:
    """Draws an observation's image, (columns, rows, 3): the player is in the middle below.

    What it carries is in its own cell.
    """
    columns, rows = image.shape[:2]
    player = (columns // 2, rows - 1)
    lines = [LEGEND]
    named = []
    for row in range(rows):
        signs = []
        for column in range(columns):
            kind = OBJECTS[image[column, row, 0]]
            if (column, row) == player:
                signs.append("@")
                continue
            signs.append(SIGNS.get(kind, kind[0].upper()))
            if kind not in SIGNS or kind == "box":
                where = _place(column - player[0], player[1] - row)
                named.append(f"{_name(image[column, row])}: {where}")
        lines.append(" ".join(signs))
    carried = image[player]
    if OBJECTS[carried[0]] in ("empty", "unseen"):
        named.append("You carry nothing.")
    else:
        named.append(f"You carry: {_name(carried)}.")
    return "\n".join(lines + named)


def _name(cell: np.ndarray) -> str:
    """Names what is in a cell: "locked yellow door"."""
    kind, colour, state = (int(number) for number in cell)
    name = f"{COLOURS[colour]} {OBJECTS[kind]}"
    return f"{DOORS[state]} {name}" if OBJECTS[kind] == "door" else name


def _place(right: int, ahead: int) -> str:
    """Says where a cell is, seen from the player."""
    parts = [f"{ahead} ahead"] if ahead else []
    if right:
        parts.append(f"{abs(right)} {'right' if right > 0 else 'left'}")
    return ", ".join(parts)
