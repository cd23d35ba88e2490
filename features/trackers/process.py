"""Holds a tracker's process: asks it, waits for it no longer than allowed, and ends it.

A thread sends what the run logs, one request after another; the run itself never waits for a
tracker but at its end. A process that does not answer in time is ended with all that it started,
and begun again with a later step, as a network may have come back; what it was sent meanwhile is
lost. Its own words go to RUN_DIR/trackers/NAME.log.

Invariant: no request is sent twice, and none of a step that the tracker's run has.
"""

import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from data.watchdog import beat
from features.trackers.exchange import TrackerSettings
from features.trackers.interface import Generations
from features.trackers.run_ids import RunIds

logger = logging.getLogger(__name__)
PROJECT = Path(__file__).resolve().parents[2]
CHILD = "features.trackers.child"
# After a process has died or was ended, seconds before another is begun.
RETRY_S = 300.0
# For the process to end by itself, once its tracker is closed.
GRACE_S = 3.0
# Between two signs of life while the run waits for a tracker's end.
TICK_S = 1.0
Request = dict[str, Any]


class TrackerError(Exception):
    """Tells what a tracker's process says went wrong, or that it says nothing."""


class ProcessTracker:
    """Sends a run's records to a tracker in a process of its own.

    Args:
        name: the tracker's, as in `settings.PACKAGES`.
        settings: what it files the run under.
        run_ids: which run of the tracker it goes on with.
        timeout_s: for an answer, and for all that is left at the end.
        python: None: this process's own.
        warn: is told of what goes wrong, by name.
    """

    def __init__(
        self,
        name: str,
        settings: TrackerSettings,
        run_ids: RunIds,
        *,
        timeout_s: float,
        python: str | None,
        warn: Callable[[str, Exception], None],
    ) -> None:
        self.name = name
        self.settings = settings
        self.run_ids = run_ids
        self.timeout_s = timeout_s
        self.python = python or sys.executable
        self.warn = warn
        self.log_file = Path(settings.folder) / "trackers" / f"{name}.log"
        self.lost = 0
        self._recorded_step = run_ids.last_step(name)
        self._retry_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: queue.Queue[Request] = queue.Queue()
        self._close_by: float | None = None
        self._given_up = False
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    # Called by the run.

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Has a step recorded, unless the tracker's run has it."""
        if step > self._recorded_step:
            self._requests.put({"log": dict(data), "step": step})

    def log_generations(self, rows: Generations, step: int) -> None:
        """Has some of validation's answers recorded."""
        if step > self._recorded_step:
            self._requests.put({"generations": [dict(row) for row in rows], "step": step})

    def begin_close(self, *, failed: bool = False) -> None:
        """Lets the thread come to its end, without waiting for it."""
        if self._close_by is None:
            self._close_by = time.monotonic() + self.timeout_s
            self._requests.put({"close": failed})

    def close(self, *, failed: bool = False) -> None:
        """Waits until all is recorded, or the time is over, which ends the process."""
        self.begin_close(failed=failed)
        assert self._close_by is not None
        while self._thread.is_alive() and time.monotonic() < self._close_by:
            beat(f"tracker {self.name} is closing")
            self._thread.join(min(TICK_S, max(self._close_by - time.monotonic(), 0.0)))
        if self._thread.is_alive():
            self._given_up = True
            self.lost += sum("log" in request for request in self._requests.queue)
            self.warn(self.name, TrackerError(f"it did not close within {self.timeout_s:g} s"))
            self._end_process()
        if self.lost:
            logger.warning("tracker %s lacks %d steps of this run", self.name, self.lost)

    # Done by the thread.

    def _serve(self) -> None:
        """Opens the tracker's run and sends the requests, until the last."""
        self._try(self._start)
        request: Request = {}
        while "close" not in request and not self._given_up:
            request = self._requests.get()
            sent = self._try(partial(self._send, request))
            self.lost += "log" in request and not sent
        self._end_process(grace_s=GRACE_S)

    def _try(self, call: Callable[[], bool]) -> bool:
        """Returns what the call does; False where it fails, which is said once."""
        try:
            return call()
        except (TrackerError, OSError) as error:
            self.warn(self.name, error)
            return False

    def _send(self, request: Request) -> bool:
        """Sends one request; returns whether there is a process for it.

        One that has ended is begun again where it is time for that.
        """
        if self._process is None and "close" not in request and time.monotonic() >= self._retry_at:
            self._start()
        if self._process is None:
            return False
        if "log" in request:
            self._note(partial(self.run_ids.sends, self.name, request["step"]))
        self._ask(request)
        return True

    def _note(self, write: Callable[[], None]) -> None:
        """Writes to trackers.json; on a full disk the tracker goes on all the same."""
        try:
            write()
        except OSError as error:
            self.warn(self.name, error)

    def _start(self) -> bool:
        """Starts the process and opens the tracker's run; returns True.

        Raises:
            TrackerError: it failed.
        """
        self._retry_at = time.monotonic() + RETRY_S
        with self._open_log() as log:
            self._process = subprocess.Popen(
                [self.python, "-m", CHILD, self.name, str(self.timeout_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(self.python),
                # Ctrl-C in the terminal is the run's to answer.
                start_new_session=True,
            )
        try:
            run_id = self.run_ids.run_id(self.name)
            opened = self._ask({"open": asdict(self.settings), "run_id": run_id})
            self._note(partial(self.run_ids.opened, self.name, opened["run_id"]))
        except (TrackerError, OSError):
            self._end_process()
            raise
        if run_id is not None and opened["run_id"] != run_id:
            logger.warning("tracker %s has no run %s any more: a new one", self.name, run_id)
        where = opened["url"] or "kept on this machine"
        logger.info("tracker %s: run %s, %s", self.name, opened["run_id"], where)
        return True

    def _open_log(self) -> BinaryIO:
        """Opens the file of the process's words; on a full disk they are lost."""
        try:
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            return self.log_file.open("ab")
        except OSError:
            return open(os.devnull, "wb")

    def _ask(self, request: Request) -> dict[str, Any]:
        """Returns the process's answer; one that does not answer is ended.

        Raises:
            TrackerError: it answers with an error, or not at all.
        """
        process = self._process
        assert process is not None
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self._end_process()

        timer = threading.Timer(self.timeout_s, expire)
        timer.daemon = True
        timer.start()
        try:
            answer = _exchange(process, request)
        finally:
            timer.cancel()
        if answer is None:
            # First: who ends it takes the code away.
            code = _exit_code(process)
            self._end_process()
            how = "its process answers no more" if code is None else f"its process ended: {code}"
            if expired.is_set() or self._given_up:
                how = f"it did not answer within {self.timeout_s:g} s and was ended"
            raise TrackerError(f"{how}; its own words are in {self.log_file}")
        if "error" in answer:
            raise TrackerError(answer["error"])
        return answer

    def _end_process(self, grace_s: float = 0.0) -> None:
        """Ends the process and all that it started; any thread may.

        Args:
            grace_s: in which it may end by itself.
        """
        # Whoever comes second waits until the first is done.
        with self._ending:
            process = self._process
            self._process = None
            if process is not None:
                end_family(process, grace_s)


def end_family(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Ends a process and all that it started, which it may do by itself for some seconds."""
    # Not above: a tracker's process imports this package with a Python that may lack it.
    import psutil

    family: list[psutil.Process] = []
    with suppress(psutil.Error):
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
    if grace_s:
        # No further request comes.
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        psutil.wait_procs(family, timeout=grace_s)
    for member in family:
        with suppress(psutil.Error):
            member.kill()
    psutil.wait_procs(family, timeout=GRACE_S)
    process.wait()


def _exit_code(process: subprocess.Popen[bytes]) -> str | None:
    """Says how a process ended; None where it lives on."""
    try:
        code = process.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        return None
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _exchange(process: subprocess.Popen[bytes], request: Request) -> dict[str, Any] | None:
    """Writes a request and reads its answer; None where the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(request, default=str).encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except (OSError, ValueError):
        return None
    return json.loads(line) if line.endswith(b"\n") else None


def _environment(python: str) -> dict[str, str]:
    """Returns the process's environment, in which it finds this project.

    Another Python's packages are its own, so that this one's PYTHONPATH is not for it.
    """
    environment = dict(os.environ)
    paths = [str(PROJECT)]
    if python == sys.executable and environment.get("PYTHONPATH"):
        paths.append(environment["PYTHONPATH"])
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment
