"""Says where a run's page will be, before anything is loaded that takes long.

Invariant: it starts nothing and reads no file.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from data.watchdog import ATTEMPT
from features.run_page.run_folder import VIEWER
from training.config import PPOConfig
from training.features import features
from training.run.files import from_here

# The page's file, as `writer.PAGE`, which is loaded with what draws it.
PAGE = "report.html"
# The features that record episodes and show them.
RECORDS = "records"
VIEWERS = "viewer"


def say_where(config: PPOConfig, program: Path, argv: Sequence[str]) -> int | None:
    """Prints where the run's page and the viewer of its episodes will be; starts nothing."""
    trainer = config.trainer
    is_started_again = ATTEMPT in os.environ
    if "file" in trainer.logger and not trainer.val_only and not is_started_again:
        print(announcement(Path(trainer.run_dir), shows_episodes(config)), flush=True)
    return None


def shows_episodes(config: PPOConfig) -> bool:
    """Says whether a run records its episodes, which a viewer shows."""
    if not {RECORDS, VIEWERS}.issubset(features()):
        return False
    from features.records.feature import keeps_records

    return keeps_records(config)


def announcement(run_dir: Path, has_viewer: bool = True) -> str:
    """Returns the lines; each path stands alone, so that a narrow terminal breaks nothing else."""
    lines = f"the run's page, from its start on:\n  {from_here(run_dir / PAGE)}"
    if has_viewer:
        lines += f"\nits episodes:\n  {from_here(run_dir / VIEWER)}"
    return lines
