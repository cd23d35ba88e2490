"""Ends a run in which nothing moves for too long, after every process has written where it stands.

Heartbeats tell of progress wherever it happens (`beat`): a phase begins, a turn is sampled or
answered, a micro-batch computed, a reward scored. All processes add their beats to one number, so
that who waits for another that works is not stalled. When none has moved for `timeout_s`, each
writes to RUN_DIR/stalls/NAME.txt what it was at, the stack of every thread, and what there is to
show (the oldest episode, the engine's queue); an earlier attempt's become NAME.txt.old. The driver
gives the ranks time for theirs and looks again: where something moves, the run goes on. Else it
says where they are, ends whatever descends from it, and leaves with code STALLED.

Invariant: no code of Python's need run for that. Where native code keeps the interpreter's lock (a
regular expression is enough) the watchdog's thread cannot; then the system's timer of the process's
computing time, which it sets forward as long as it runs, sends WAKE, whose handler in C writes the
stacks and ends the process.
"""

import faulthandler
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

# Exit code of a run that stalled; "try again", in sysexits.h.
STALLED = 75
# Nobody else's, and it ends a process that has no handler.
WAKE = signal.SIGVTALRM
# The environment variable that says which attempt a process is of a run with
# `supervisor.max_restarts`.
ATTEMPT = "PPO_CORE_ATTEMPT"
KILLING_S = 3.0
# Between two looks at the beats.
LONGEST_TICK_S = 10.0
# Ticks for which the driver waits for the ranks' records, and these for their end.
DRIVER_WAITS = 4
RANK_WAITS = 8
STORE_TIMEOUT = timedelta(seconds=5)


class WatchdogSettings(NamedTuple):
    """Sets when a run counts as stalled, and where its records go.

    Attributes:
        timeout_s: seconds without a beat after which it is.
        folder: to write to.
        store: the address of a torch TCPStore, where beats add up; None: this process is the only
            one.
    """

    timeout_s: float
    folder: Path
    store: tuple[str, int] | None = None


NOT_WATCHING = WatchdogSettings(timeout_s=math.inf, folder=Path())


class Watchdog:
    """Watches this process; `beat` and the places count before it starts, too.

    There is one a process, `WATCHDOG`.

    Attributes:
        step, place: where the run is, as errors say it: `place` is a phase in the driver, a call on
            a rank.
        settings: `NOT_WATCHING` while nothing is watched.
        store: counts the beats of all processes; None: its own alone count.
    """

    def __init__(self) -> None:
        self.beats = 0
        self.last_beat = "nothing yet"
        self.step = 0
        self.place = ""
        self.store: Any = None
        self.settings = NOT_WATCHING
        self._describe: Callable[[Any], str] = str
        self._shown: Callable[[], Any] | None = None

    def beat(self, what: str) -> None:
        """Counts progress, and remembers what it was."""
        self.beats += 1
        self.last_beat = what

    def show(self, describe: Callable[[Any], str], thing: Any) -> None:
        """Adds `describe(thing)` to a stall's record while the thing is there.

        It takes the place of what was to be shown before.
        """
        self._describe = describe
        self._shown = weakref.ref(thing)

    @property
    def where(self) -> str:
        """Names the step, which only the driver knows, and the phase or call."""
        words = []
        if self.step > 0:
            words.append(f"step {self.step}")
        if self.place:
            words.append(self.place)
        return ", ".join(words) or "before the first step"

    def start(self, settings: WatchdogSettings, name: str, *, driver: bool) -> None:
        """Begins to watch; the driver's watchdog ends the run."""
        self.settings = settings
        self.name = name
        self.driver = driver
        if driver:
            set_records_aside(settings.folder)
        if settings.store is not None:
            self.join(settings.store)
        # However many threads compute, less than `timeout_s` passes on the process's clock in a
        # tick.
        cores = os.cpu_count() or 1
        self._tick_s = min(settings.timeout_s / (8 + cores), LONGEST_TICK_S)
        self._ended = threading.Event()
        stream = sys.__stderr__ or sys.stderr
        faulthandler.register(WAKE, file=stream, all_threads=True, chain=True)
        self._set_timer()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def join(self, address: tuple[str, int]) -> None:
        """Adds this process's beats up with those of all that have joined there."""
        from torch.distributed import TCPStore

        self.settings = self.settings._replace(store=address)
        self.store = TCPStore(
            *address, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT
        )

    def stop(self) -> None:
        """Watches no longer."""
        self._ended.set()
        self._thread.join()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        faulthandler.unregister(WAKE)
        self.settings = NOT_WATCHING
        self.store = None

    def _set_timer(self) -> None:
        """Makes the system send WAKE unless it is set again in time."""
        signal.setitimer(signal.ITIMER_VIRTUAL, self.settings.timeout_s + 3 * self._tick_s)

    def _run(self) -> None:
        """Looks at the beats, tick by tick; ends the process where none has come for too long."""
        last_moved = time.monotonic()
        self._seen_beats = self.beats
        self._seen_total = 0
        while not self._ended.wait(self._tick_s):
            if self._has_moved():
                last_moved = time.monotonic()
            still_s = time.monotonic() - last_moved
            self._set_timer()
            if still_s >= self.settings.timeout_s:
                moves_on = False
                try:
                    moves_on = self._moves_on(still_s)
                    if not moves_on and self.driver:
                        self._end_run()
                finally:
                    if not moves_on:
                        os._exit(STALLED)
                last_moved = time.monotonic()

    def _has_moved(self) -> bool:
        """Checks whether a beat has come since the last look, here or in another process."""
        beats = self.beats
        total = self._seen_total
        # Its host may be gone.
        with suppress(Exception):
            if self.store is not None:
                total = self.store.add("beats", beats - self._seen_beats)
        moved = beats != self._seen_beats or total != self._seen_total
        self._seen_beats = beats
        self._seen_total = total
        return moved

    def _moves_on(self, still_s: float) -> bool:
        """Writes this process's record, and waits for the others'; True where a beat comes then."""
        self._write_record(still_s)
        for _ in range(DRIVER_WAITS if self.driver else RANK_WAITS):
            if self._ended.wait(self._tick_s):
                return True
            self._set_timer()
            if self._has_moved():
                if self.driver:
                    print(
                        f"nothing moved for {still_s:.0f} s, but now something does, and the run "
                        f"goes on; where it stood is in {self.settings.folder}",
                        file=sys.stderr,
                        flush=True,
                    )
                return True
        return False

    def _end_run(self) -> None:
        """Shows the records of all processes, and ends what descends from this one."""
        lines = [
            f"nothing has moved for {self.settings.timeout_s:g} s (trainer.stall_timeout_s): "
            f"{self.where}; stacks, oldest episodes and queues are in {self.settings.folder}:"
        ]
        for path in sorted(self.settings.folder.glob("*.txt")):
            first_line, _, _ = path.read_text(errors="replace").partition("\n")
            lines.append(f"  {first_line}")
        print(*lines, sep="\n", file=sys.stderr, flush=True)
        end_children()

    def _write_record(self, still_s: float) -> None:
        """Writes where this process is, its stacks, and what there is to show."""
        self.settings.folder.mkdir(parents=True, exist_ok=True)
        with (self.settings.folder / f"{self.name}.txt").open("w") as file:
            headline = f"{self.name}: {self.where}; {still_s:.0f} s after: {self.last_beat}"
            print(headline, file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
            # Other threads may be writing what it reads.
            with suppress(Exception):
                if self._shown is not None:
                    print(self._describe(self._shown()), file=file)


WATCHDOG = Watchdog()
beat = WATCHDOG.beat


@contextmanager
def watching(timeout_s: float | None, folder: Path, name: str) -> Iterator[None]:
    """Watches over the block in the driver's process; None: nothing does."""
    if timeout_s is None:
        yield
        return
    WATCHDOG.start(WatchdogSettings(timeout_s, folder), name, driver=True)
    try:
        yield
    finally:
        WATCHDOG.stop()


def set_records_aside(folder: Path) -> None:
    """Renames the records of an earlier attempt, so that new ones can be told from them."""
    for path in folder.glob("*.txt"):
        path.replace(path.with_name(f"{path.name}.old"))


def end_children() -> None:
    """Ends all that descends from this process: what lives on for KILLING_S is killed."""
    import psutil

    children = psutil.Process().children(recursive=True)
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for child in children:
            with suppress(psutil.Error):
                end(child)
        _, children = psutil.wait_procs(children, timeout=KILLING_S)
