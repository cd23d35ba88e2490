"""A task at ClearML; its variables are CLEARML_API_HOST, CLEARML_API_ACCESS_KEY, ….

With CLEARML_OFFLINE_MODE=1 each start is a session of its own, which
`Task.import_offline_session` sends to a server later.
"""

from typing import Any

from features.trackers.exchange import TrackerSettings
from features.trackers.interface import (
    GENERATION_COLUMNS,
    GENERATIONS_NAME,
    Generations,
    as_table,
)

# Nothing of this process is the run's. Looking for a repository forks beside ClearML's own threads,
# where it was seen to hang at the end of the run.
OFF = (
    "detect_repository",
    "matplotlib",
    "tensorflow",
    "tensorboard",
    "pytorch",
    "xgboost",
    "scikit",
    "fastai",
    "lightgbm",
    "hydra",
    "tfdefines",
    "joblib",
    "megengine",
    "catboost",
    "gradio",
)


class ClearmlRun:
    """Logs to ClearML."""

    def __init__(self, settings: TrackerSettings, run_id: str | None) -> None:
        from clearml import Task

        continues: dict[str, Any] = {"reuse_last_task_id": False}
        if run_id and not Task.is_offline():
            # Steps count on from nothing: ours are those of the whole run.
            continues = {"reuse_last_task_id": run_id, "continue_last_task": 0}
        self.task: Any = Task.init(
            project_name=settings.project,
            task_name=settings.experiment,
            auto_connect_arg_parser=False,
            auto_connect_frameworks=dict.fromkeys(OFF, False),
            auto_connect_streams=False,
            **continues,
        )
        self.run_id = str(self.task.id)
        self.url: str | None = None
        if not Task.is_offline():
            self.url = self.task.get_output_log_web_page()
        if self.run_id != run_id:
            self.task.set_parameters_as_dict(settings.config)
        self.logger: Any = self.task.get_logger()

    def log(self, data: dict[str, float], step: int) -> None:
        """Reports each metric as a curve, in the plot that its name's first part names."""
        for key, value in data.items():
            title, _, series = key.partition("/")
            self.logger.report_scalar(title, series or title, value, step)
        self.logger.flush()

    def log_generations(self, rows: Generations, step: int) -> None:
        """Reports a table."""
        cells = [list(GENERATION_COLUMNS), *as_table(rows, step)]
        title, _, series = GENERATIONS_NAME.partition("/")
        self.logger.report_table(title, series, iteration=step, table_plot=cells)

    def close(self, *, failed: bool) -> None:
        """Ends the task, once all is sent."""
        if failed:
            self.task.mark_failed(status_message="the run ended by an error")
        self.task.close()
