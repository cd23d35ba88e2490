"""Makes the episode viewer of runs: `python -m features.viewer.command RUN_DIR`.

What other features ask of viewers stands here.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from training.features import Feature

FEATURE = Feature(
    moved_modules={
        "training.run.viewer": "features.viewer",
        "training.run.episodes": "features.viewer.command",
    },
    observer="features.viewer.live:open_live_viewer",
    # Behind the records, whose files it reads, and before the page, which links to it.
    observer_order=35,
)


def make_viewer(folder: Path) -> str:
    """Makes FOLDER/viewer of the episodes in FOLDER/episodes; returns why not, "" where it is."""
    from features.viewer.build import build_viewer
    from features.viewer.command import find_run, own_folder

    try:
        build_viewer([find_run(folder, 0)], own_folder(folder), shows_progress=False)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def episode_address(step: int, episode_id: str, turn: int) -> str:
    """Returns where, from a folder on, the viewer of its episodes shows a turn of one.

    Args:
        step: of training, in which it was played. turn: the first is 0.
    """
    return f"viewer/index.html#episode/0/train/{step}/{quote(episode_id, safe='')}?turn={turn + 1}"
