"""Tells what keeps the Python tool's snippets from files, network and processes here.

Nothing is defined here: features/sandbox/walls.py finds it out, and is imported at first use.
"""

from typing import TYPE_CHECKING

from data.late_names import late_names

if TYPE_CHECKING:
    from features.sandbox.walls import missing_walls as missing_walls
    from features.sandbox.walls import standing_walls as standing_walls
else:
    __getattr__ = late_names(
        __name__,
        {
            "missing_walls": "features.sandbox.walls",
            "standing_walls": "features.sandbox.walls",
        },
    )
