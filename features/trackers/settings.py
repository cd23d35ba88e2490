"""The settings of trackers; trainer.logger says which ones a run has."""

from training.config.section import InputPath, PositiveFloat, Section


class TrackingSettings(Section):
    """How trackers that are packages of their own are run."""

    #: seconds for which a tracker may not answer, before its process is ended
    timeout_s: PositiveFloat = 120.0
    #: the Python that has the trackers' packages; null = the run's own
    python: InputPath | None = None
