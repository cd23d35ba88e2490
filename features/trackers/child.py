"""A tracker's process: `python -m features.trackers.child NAME SECONDS`, started by `process`.

It answers the requests of its standard input on its standard output (see `exchange`). The package
gets neither: what it reads is empty, what it prints goes to the log with its errors. Invariant:
whatever the package raises is an answer; without the run that asks, the process ends.
"""

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol, TextIO

from features.trackers.exchange import TrackerSettings
from features.trackers.interface import Generations

# The class of each tracker's run, by its name.
RUNS = {
    "wandb": ("wandb_run", "WandbRun"),
    "mlflow": ("mlflow_run", "MlflowRun"),
    "swanlab": ("swanlab_run", "SwanlabRun"),
    "trackio": ("trackio_run", "TrackioRun"),
    "clearml": ("clearml_run", "ClearmlRun"),
}
# Between two looks at whether the run still lives.
LOOK_S = 5.0


class TrackedRun(Protocol):
    """A tracker's run, which its constructor opens or continues.

    Attributes:
        run_id: what continues it.
        url: where it is seen; None: nowhere but on this machine.
    """

    run_id: str
    url: str | None

    def log(self, data: dict[str, float], step: int) -> None:
        """Records one step."""

    def log_generations(self, rows: Generations, step: int) -> None:
        """Records some of validation's answers."""

    def close(self, *, failed: bool) -> None:
        """Ends the run once all is recorded."""


def main(name: str, timeout_s: float) -> None:
    """Answers requests about the tracker's run until they end."""
    requests, answers = take_streams()
    watcher = threading.Thread(target=end_with, args=(os.getppid(), timeout_s), daemon=True)
    watcher.start()
    for answer in serve(name, requests):
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def take_streams() -> tuple[TextIO, TextIO]:
    """Takes standard input and output for requests and answers, away from the package.

    Processes that it starts do not inherit them.
    """
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, answers


def serve(name: str, requests: TextIO) -> Iterator[dict[str, Any]]:
    """Yields the answer to each request; where they end without a close the run is closed."""
    run: TrackedRun | None = None
    for line in requests:
        request = json.loads(line)
        try:
            if "open" in request:
                run = open_run(name, TrackerSettings(**request["open"]), request["run_id"])
                yield {"run_id": run.run_id, "url": run.url}
                continue
            assert run is not None, "the first request opens the run"
            if "log" in request:
                run.log(request["log"], request["step"])
            elif "generations" in request:
                run.log_generations(request["generations"], request["step"])
            elif "close" in request:
                closing, run = run, None
                closing.close(failed=request["close"])
            yield {}
            if "close" in request:
                return
        # Packages raise what they like, SystemExit too; it is theirs and costs this request.
        except (Exception, SystemExit) as error:
            yield {"error": f"{type(error).__name__}: {error}"[:2000]}
    if run is not None:
        run.close(failed=True)


def open_run(name: str, settings: TrackerSettings, run_id: str | None) -> TrackedRun:
    """Opens a run of the tracker of this name, or goes on with one."""
    module, cls = RUNS[name]
    run: TrackedRun = getattr(importlib.import_module(f"features.trackers.{module}"), cls)(
        settings, run_id
    )
    return run


def end_with(parent: int, timeout_s: float) -> None:
    """Ends this process where the one that started it has died, after the time to close."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    time.sleep(timeout_s)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
