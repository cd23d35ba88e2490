"""The supervisor's settings."""

from training.config.section import NonNegativeInt, Section


class SupervisorSettings(Section):
    """How a run that crashed or hangs is started again."""

    #: how often a run that fails is started again, from its last checkpoint
    max_restarts: NonNegativeInt = 0
