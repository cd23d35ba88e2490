"""Hands a run's steps, and validation's answers, to the trackers that trainer.logger names."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from features.trackers.base import Tracking
from features.trackers.settings import TrackingSettings
from training.observers import Generations, ObservedRun, Observer

# The core prints this one's line itself.
CONSOLE = "console"
# A validation alone writes nothing into the run's folder, which would cut the run's files back.
WRITE_NO_FILE = ("json",)


class Trackers(Observer):
    """Opens trackers for the steps of a run.

    Args:
        run: the run.
        names: of the trackers.
    """

    def __init__(self, run: ObservedRun, names: Sequence[str]) -> None:
        self.run = run
        self.names = list(names)
        self.tracking: Tracking | None = None
        # What is sent with the step's metrics.
        self.generations: Generations = ()

    def run_started(self, step: int, in_flight: Sequence[int]) -> None:
        """Opens the trackers; what they have of later steps is cut."""
        config = self.run.config
        settings = config.section(TrackingSettings)
        self.tracking = Tracking(
            config.trainer.project_name,
            config.trainer.experiment_name,
            self.names,
            config=asdict(config),
            local_dir=self.run.run_dir,
            resume_step=step,
            timeout_s=settings.timeout_s,
            python=settings.python,
            goes_back=config.trainer.resume_mode == "resume_path",
        )

    def validated(self, step: int, metrics: Mapping[str, float], generations: Generations) -> None:
        """Keeps some answers, which go out before the step's metrics."""
        self.generations = list(generations)

    def step_logged(self, metrics: Mapping[str, float]) -> None:
        """Sends the step."""
        if self.tracking is None:
            return
        self.tracking.log_generations(self.generations, step=self.run.step)
        self.generations = ()
        self.tracking.log(metrics, step=self.run.step)

    def run_ended(self, error: BaseException | None) -> None:
        """Closes the trackers."""
        if self.tracking is not None:
            self.tracking.close(failed=error is not None)
        self.tracking = None


def open_trackers(run: ObservedRun) -> Trackers | None:
    """Opens what hands a run's steps to trackers; None where the config names none."""
    trainer = run.config.trainer
    names = [name for name in trainer.logger if name != CONSOLE]
    if trainer.val_only:
        names = [name for name in names if name in WRITE_NO_FILE]
    return Trackers(run, names) if names else None
