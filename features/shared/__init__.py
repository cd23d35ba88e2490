"""Holds what several features use and none of them owns; it is no feature, and knows none.

turn_notes.py   what a feature tells beside the turns of recorded episodes
elements.js     makes elements and texts, on the run page as in the viewer

Invariant: each of the features that use it may be deleted. A folder without a feature.py brings
nothing to a run, and training/features.py does not read it.
"""

from pathlib import Path

ELEMENTS = Path(__file__).with_name("elements.js")
