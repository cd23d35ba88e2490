"""Says where a run's page is, once it is there: a run that is refused has none.

Invariant: it starts nothing and reads no file.
"""

from pathlib import Path

from features.run_page.run_folder import VIEWER
from features.run_page.writer import PAGE
from training.config import PPOConfig
from training.features import features
from training.run.files import from_here

# The features that record episodes and show them.
RECORDS = "records"
VIEWERS = "viewer"


def say_where(config: PPOConfig, run_dir: Path) -> None:
    """Prints where the run's page and the viewer of its episodes are."""
    print(announcement(run_dir, shows_episodes(config)), flush=True)


def shows_episodes(config: PPOConfig) -> bool:
    """Says whether a run records its episodes, which a viewer shows."""
    if not {RECORDS, VIEWERS}.issubset(features()):
        return False
    from features.records.feature import keeps_records

    return keeps_records(config)


def announcement(run_dir: Path, has_viewer: bool = True) -> str:
    """Returns the lines; each path stands alone, so that a narrow terminal breaks nothing else."""
    lines = f"the run's page:\n  {from_here(run_dir / PAGE)}"
    if has_viewer:
        lines += f"\nits episodes:\n  {from_here(run_dir / VIEWER)}"
    return lines
