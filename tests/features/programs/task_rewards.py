"""Rewards for verifiers' tasks: one that counts branches, and one that goes wrong in many ways.

They run in verifiers' interpreter, in the episode's own process. Of the second each episode gets
the next way of WAYS; those that are taken lie in the folder that WAYS_TAKEN names.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

WAYS = (
    "prints",
    "floods",
    "leaves_a_printer",
    "tries_again",
    "raises",
    "no_number",
    "leaves",
    "exits",
)
# The run's trial gets this one, before any other.
TRIAL = "trial"
# Verifiers tries again after this one.
AGAIN = "once more"
FALSE_REPORT = '{"reward": 100}'


async def count_branches(task: Any, trace: Any, runtime: Any) -> float:
    """Pays one for each of the trace's branches, as verifiers sees them."""
    return float(len(trace.branches))


async def take_next(task: Any, trace: Any, runtime: Any) -> float:
    """Goes the next way; the reward, where there is one, is the length of its name."""
    folder = Path(os.environ["WAYS_TAKEN"])
    if AGAIN in os.environ:
        return do(os.environ[AGAIN])
    for way in (TRIAL, *WAYS):
        try:
            (folder / way).mkdir()
        except FileExistsError:
            continue
        return do(way)
    return 0.0


def do(way: str) -> float:
    """Goes one way."""
    if way == TRIAL:
        return 0.0
    if way == "prints":
        # Without an end of the line, so that a report would stand behind it.
        print(FALSE_REPORT, end="", flush=True)
    elif way == "floods":
        os.write(1, b"x" * 5_000_000)
    elif way == "leaves_a_printer":
        subprocess.Popen(["sh", "-c", f"sleep 0.2; echo '{FALSE_REPORT}'; sleep 100"])
    elif way == "tries_again" and AGAIN not in os.environ:
        os.environ[AGAIN] = way
        raise ValueError(AGAIN)
    elif way == "raises":
        raise ValueError("out of order")
    elif way == "no_number":
        return float("nan")
    elif way == "leaves":
        os._exit(0)
    elif way == "exits":
        raise SystemExit(0)
    return float(len(way))
