"""The settings of what a run records of its episodes."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from training.config.section import NonNegativeFloat, OutputPath, Section

if TYPE_CHECKING:
    from training.config import PPOConfig


class RecordsSettings(Section):
    """What a run records of what it plays and trains on."""

    #: GiB of episodes that are kept; of more every other step goes; 0 = nothing is recorded
    keep_gib: NonNegativeFloat = 2.0
    #: folder of the episodes (docs/episodes.md); null = RUN_DIR/episodes
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

    def problems(self, config: "PPOConfig") -> Iterator[str]:
        """Yields what keeps a run from recording as it should."""
        # The checks of files import what reads them.
        from training.config.resources.files import unwritable_folder

        if self.folder is not None and self.is_on:
            yield from unwritable_folder("records.folder", self.folder)
        if self.gradients:
            yield from self._gradient_problems(config)

    def _gradient_problems(self, config: "PPOConfig") -> Iterator[str]:
        """Yields what keeps a run from recording each episode's share of the gradient."""
        trainer = config.trainer
        if trainer.num_ranks > 1:
            yield (
                f"records.gradients=true needs one rank, and trainer.nnodes={trainer.nnodes} x "
                f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} are {trainer.num_ranks}: set "
                "both to 1, or take it out"
            )
        if trainer.train_finished_groups:
            yield (
                "records.gradients=true compares each episode with the whole gradient, which "
                "trainer.train_finished_groups=true has only at the end: take one of the two out"
            )
        if not self.is_on:
            yield (
                "records.gradients=true has nowhere to go with records.keep_gib=0: set that above 0"
            )
