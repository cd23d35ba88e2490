"""A run at MLflow; its variables are MLFLOW_TRACKING_URI, MLFLOW_TRACKING_TOKEN, ….

MLflow takes letters, digits and `_-./: ` in the names of metrics: `@` becomes `_at_`, what else it
refuses `_`.
"""

import re
from typing import Any

from features.trackers.exchange import TrackerSettings, flat_config
from features.trackers.interface import GENERATION_COLUMNS, Generations, as_table

REFUSED = re.compile(r"[^\w\-./: ]", re.ASCII)
# MLflow's own limits: of a request, and of a parameter's value.
MOST_AT_ONCE = 100
MOST_CHARACTERS = 6000


class MlflowRun:
    """Logs to MLflow."""

    def __init__(self, settings: TrackerSettings, run_id: str | None) -> None:
        import mlflow

        self.mlflow: Any = mlflow
        mlflow.set_experiment(settings.project)
        self.run_id = run_id if run_id and self._continues(run_id) else self._begin(settings)
        self.url: str | None = None
        uri = mlflow.get_tracking_uri()
        if uri.startswith(("http://", "https://")):
            experiment_id = mlflow.active_run().info.experiment_id
            self.url = f"{uri}/#/experiments/{experiment_id}/runs/{self.run_id}"

    def _continues(self, run_id: str) -> bool:
        """Goes on with a run; False where this store has no such run."""
        try:
            self.mlflow.start_run(run_id=run_id)
        except self.mlflow.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        return True

    def _begin(self, settings: TrackerSettings) -> str:
        """Begins a run with the configuration for its parameters; returns its id."""
        run = self.mlflow.start_run(run_name=settings.experiment)
        leaves = list(flat_config(settings.config).items())
        for start in range(0, len(leaves), MOST_AT_ONCE):
            part = leaves[start : start + MOST_AT_ONCE]
            self.mlflow.log_params(
                {_allowed(key): str(value)[:MOST_CHARACTERS] for key, value in part}
            )
        return str(run.info.run_id)

    def log(self, data: dict[str, float], step: int) -> None:
        """Logs the metrics of a step."""
        named = [(_allowed(key), value) for key, value in data.items()]
        for start in range(0, len(named), MOST_AT_ONCE):
            self.mlflow.log_metrics(dict(named[start : start + MOST_AT_ONCE]), step=step)

    def log_generations(self, rows: Generations, step: int) -> None:
        """Logs a table as the artifact val_generations/STEP.json, as MLflow's own tables are."""
        table = {"columns": list(GENERATION_COLUMNS), "data": as_table(rows, step)}
        self.mlflow.log_dict(table, f"val_generations/{step}.json")

    def close(self, *, failed: bool) -> None:
        """Ends the run, as failed or finished."""
        self.mlflow.end_run("FAILED" if failed else "FINISHED")


def _allowed(name: str) -> str:
    """Returns a name without the characters that MLflow refuses."""
    return REFUSED.sub("_", name.replace("@", "_at_"))
