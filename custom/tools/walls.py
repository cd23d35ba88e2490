"""Tells what keeps the Python tool's snippets from files, network and processes here.

Nothing is defined here: features/sandbox/walls.py finds it out.
"""

from features.sandbox.walls import missing_walls as missing_walls
from features.sandbox.walls import standing_walls as standing_walls
