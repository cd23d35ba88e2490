"""What keeps the Python tool's snippets from your files, the network and other processes here.

Nothing is defined here: contrib/sandbox/walls.py finds it out.
"""

from contrib.sandbox.walls import missing_walls as missing_walls
from contrib.sandbox.walls import standing_walls as standing_walls
