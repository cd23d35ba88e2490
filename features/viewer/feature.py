"""Makes the episode viewer of runs: `python -m features.viewer.command RUN_DIR`."""

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
