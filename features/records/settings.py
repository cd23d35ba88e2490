"""The settings of what a run records of its episodes."""

from pathlib import Path

from training.config.section import NonNegativeFloat, OutputPath, Section


class RecordsSettings(Section):
    """What a run records of what it plays and trains on."""

    #: GiB of episodes that are kept; of more every other step goes; 0 = nothing is recorded
    keep_gib: NonNegativeFloat = 2.0
    #: folder of the episodes (features/records/README.md); null = RUN_DIR/episodes
    folder: OutputPath | None = None
    #: record each episode's share of the step's gradient: another backward pass, on one rank
    gradients: bool = False

    @property
    def is_on(self) -> bool:
        """Returns whether what is played and trained on is written to files."""
        return self.keep_gib > 0

    def folder_of(self, run_dir: str | Path) -> Path:
        """Returns the folder of the episodes that a run records."""
        return Path(self.folder or Path(run_dir) / "episodes").absolute()
