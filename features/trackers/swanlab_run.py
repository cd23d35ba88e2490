"""A run at SwanLab; its variables are SWANLAB_API_KEY, SWANLAB_API_HOST, SWANLAB_MODE, ….

What is kept here (SWANLAB_MODE=offline) lies in RUN_DIR/swanlog, unless SWANLAB_LOG_DIR names a
folder, and a resumed run in a second folder of the same id; SWANLAB_MODE=local needs
`swanlab[dashboard]`.
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


class SwanlabRun:
    """Logs to SwanLab."""

    def __init__(self, settings: TrackerSettings, run_id: str | None) -> None:
        import swanlab

        self.swanlab: Any = swanlab
        self.run: Any = swanlab.init(
            project=settings.project,
            name=settings.experiment,
            config=settings.config,
            log_dir=os.environ.get("SWANLAB_LOG_DIR", f"{settings.folder}/swanlog"),
            id=run_id,
            resume="allow" if run_id else None,
        )
        self.run_id = str(self.run.id)
        # In other modes there is none, and asking for it an error.
        self.url: str | None = self.run.url if self.run.mode == "online" else None

    def log(self, data: dict[str, float], step: int) -> None:
        """Logs the metrics of a step."""
        self.swanlab.log(data, step=step)

    def log_generations(self, rows: Generations, step: int) -> None:
        """Logs a table."""
        table = self.swanlab.echarts.Table()
        cells = [[str(cell) for cell in row] for row in as_table(rows, step)]
        table.add(list(GENERATION_COLUMNS), cells)
        self.swanlab.log({GENERATIONS_NAME: table}, step=step)

    def close(self, *, failed: bool) -> None:
        """Ends the run, as crashed or done."""
        self.swanlab.finish(state="crashed" if failed else "success")
