"""Starts several runs of the tree in the working folder, forked from one Python with torch loaded.

    python scripts/same_starts.py JOBS.json LIMIT_S

JOBS.json is a list of {"argv": arguments of main.py, "log": file}. Prints a JSON line a job: its
exit code and its seconds. Invariant: one job runs at a time, and none sees what another did.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

# What every run imports; a tree that has one no longer is started without it.
PRELOADED = ("torch", "matplotlib.pyplot", "training.ray_trainer", "training.agent_trainer")


def start(job: dict[str, Any], limit_s: int) -> dict[str, Any]:
    """Runs a job in a fork; returns its exit code and seconds."""
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _become(job, limit_s)
    _, status = os.waitpid(pid, 0)
    return {
        "exit_code": os.waitstatus_to_exitcode(status),
        "seconds": round(time.monotonic() - began, 1),
    }


def _become(job: dict[str, Any], limit_s: int) -> None:
    """Turns this process into `main.py` with the job's arguments, and ends it."""
    code = 1
    try:
        signal.alarm(limit_s)
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        sys.argv = ["main.py", *job["argv"]]
        code = importlib.import_module("main").main(job["argv"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Nothing of the parent's is to be closed here.
        os._exit(code)


def run_jobs(jobs_file: Path, limit_s: int) -> None:
    """Runs the jobs one after another and prints a line for each."""
    # This file's folder stands there, which holds none of the tree's modules.
    sys.path[0] = str(Path.cwd())
    importlib.import_module("main")
    for name in PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    for job in json.loads(jobs_file.read_text()):
        print(json.dumps(start(job, limit_s)), flush=True)


if __name__ == "__main__":
    run_jobs(Path(sys.argv[1]), int(sys.argv[2]))
