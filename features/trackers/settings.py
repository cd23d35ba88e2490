"""The settings of trackers; trainer.logger says which ones a run has."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from training.config.section import InputPath, PositiveFloat, Section

if TYPE_CHECKING:
    from training.config import PPOConfig


class TrackingSettings(Section):
    """How trackers that are packages of their own are run."""

    #: seconds for which a tracker may not answer, before its process is ended
    timeout_s: PositiveFloat = 120.0
    #: the Python that has the trackers' packages; null = the run's own
    python: InputPath | None = None

    def problems(self, config: "PPOConfig") -> Iterator[str]:
        """Yields which packages of trackers are missing."""
        # Asked for where a run is checked, not where its settings are read.
        from features.trackers.packages import missing_packages

        yield from missing_packages(config.trainer.logger, self.python)
