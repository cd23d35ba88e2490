"""A run at Weights & Biases; its variables are WANDB_API_KEY, WANDB_BASE_URL, WANDB_MODE, ….

With WANDB_MODE=offline the run lies in RUN_DIR/wandb, and a resumed one in a second folder of the
same id, which `wandb sync` joins.
"""

import os
from typing import Any

from features.trackers.exchange import TrackerSettings
from features.trackers.interface import (
    GENERATION_COLUMNS,
    GENERATIONS_NAME,
    Generations,
    as_table,
)


class WandbRun:
    """Logs to Weights & Biases."""

    def __init__(self, settings: TrackerSettings, run_id: str | None) -> None:
        import wandb

        self.wandb: Any = wandb
        own = wandb.Settings(
            # wandb measures the run's process beside the metrics: it started this one.
            x_stats_pid=os.getppid(),
            x_stats_track_process_tree=True,
            console="off",
        )
        self.run: Any = wandb.init(
            project=settings.project,
            name=settings.experiment,
            config=settings.config,
            dir=settings.folder,
            id=run_id,
            resume="allow" if run_id else None,
            settings=own,
        )
        self.run_id: str = self.run.id
        self.url: str | None = self.run.url

    def log(self, data: dict[str, float], step: int) -> None:
        """Logs the metrics of a step."""
        self.run.log(data, step=step, commit=True)

    def log_generations(self, rows: Generations, step: int) -> None:
        """Logs a table, which the step's metrics follow."""
        table = self.wandb.Table(columns=list(GENERATION_COLUMNS), data=as_table(rows, step))
        self.run.log({GENERATIONS_NAME: table}, step=step, commit=False)

    def close(self, *, failed: bool) -> None:
        """Ends the run at wandb, once all is there."""
        self.run.finish(exit_code=int(failed))
