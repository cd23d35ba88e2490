"""A run at trackio; its variables are TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL, ….

Trackio continues a run by its name: it is the experiment's with a part that no other run has.
"""

import uuid
from typing import Any

from features.trackers.exchange import TrackerSettings
from features.trackers.interface import (
    GENERATION_COLUMNS,
    GENERATIONS_NAME,
    Generations,
    as_table,
)


class TrackioRun:
    """Logs to trackio."""

    def __init__(self, settings: TrackerSettings, run_id: str | None) -> None:
        import trackio

        self.trackio: Any = trackio
        self.run_id = run_id or f"{settings.experiment}-{uuid.uuid4().hex[:6]}"
        self.run: Any = trackio.init(
            project=settings.project,
            name=self.run_id,
            config=settings.config,
            resume="allow",
            embed=False,
        )
        self.url: str | None = self.run.url

    def log(self, data: dict[str, float], step: int) -> None:
        """Logs the metrics of a step."""
        self.run.log(data, step=step)

    def log_generations(self, rows: Generations, step: int) -> None:
        """Logs a table."""
        columns = list(GENERATION_COLUMNS)
        table = self.trackio.Table(columns=columns, data=as_table(rows, step))
        self.run.log({GENERATIONS_NAME: table}, step=step)

    def close(self, *, failed: bool) -> None:
        """Ends the run, once all is written or sent."""
        self.run.finish()
