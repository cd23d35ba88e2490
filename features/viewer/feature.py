"""Makes the episode viewer of runs: `python -m features.viewer.command RUN_DIR`."""

from training.features import Feature

FEATURE = Feature(
    moved_modules={
        "training.run.viewer": "features.viewer",
        "training.run.episodes": "features.viewer.command",
    },
)
