"""The watch: where nothing moves for too long, every process of a run writes where it stands, and the run ends.

Progress is told by `beat` wherever it happens: a phase begins, a turn is sampled or answered, a micro-batch computed, a
reward scored. All processes add their beats to one number, so that who waits for another that works is not stalled.
When none has moved for `timeout_s`, each writes to RUN_DIR/stalls/NAME.txt what it was at, the stack of every thread,
and what there is to show (the oldest episode, the engine's queue); the driver gives the ranks time for theirs, says
where they are, ends whatever descends from it, and leaves with code STALLED.

Invariant: no code of Python's need run for that. Where native code keeps the interpreter's lock (a regular expression
is enough) this thread cannot; then the system's timer of the process's computing time, which it sets forward as long as
it runs, sends WAKE, whose handler in C writes the stacks and ends the process.
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

from data.texts import say

# Exit code of a run that stalled; "try again", in sysexits.h.
STALLED = 75
# Nobody else's, and it ends a process that has no handler.
WAKE = signal.SIGVTALRM
# Says which attempt a process is of a run with `trainer.max_restarts`.
ATTEMPT = "PPO_CORE_ATTEMPT"
KILLING_S = 3.0


class Watched(NamedTuple):
    """Says after how many seconds without a beat a run is stalled, the folder to write to, and where to add beats up.

    `store` is the address of a torch TCPStore; None: this process is the only one.
    """

    timeout_s: float
    folder: Path
    store: tuple[str, int] | None = None


class Watch:
    """Is a process's own watch, `WATCH`; `beat` and the places count before it starts, too.

    Attributes:
        step, place: where the run is, as errors say it: `place` is a phase in the driver, a call on a rank.
        settings: without a time while nothing is watched.
        store: counts the beats of all processes; None: its own alone count.
    """

    def __init__(self) -> None:
        self.beats, self.what, self.step, self.place = 0, "nothing yet", 0, ""
        self.store: Any = None
        self.settings = Watched(math.inf, Path())
        self._shown: tuple[Callable[[Any], str], Callable[[], Any]] = (
            lambda thing: "",
            lambda: None,
        )

    def beat(self, what: str) -> None:
        """Tells of progress."""
        self.beats, self.what = self.beats + 1, what

    def show(self, describe: Callable[[Any], str], thing: Any) -> None:
        """Has a stall's record say `describe(thing)` while the thing is there, in place of what was to be shown."""
        self._shown = describe, weakref.ref(thing)

    @property
    def where(self) -> str:
        """Says the step, which only the driver knows, and the phase or call."""
        return (
            ", ".join(filter(None, (f"step {self.step}" * (self.step > 0), self.place)))
            or "before the first step"
        )

    def start(self, settings: Watched, name: str, *, driver: bool) -> None:
        """Begins to watch; the driver's watch ends the run."""
        self.settings, self.name, self.driver = settings, name, driver
        if settings.store is not None:
            self.join(settings.store)
        # However many threads compute, less than `timeout_s` passes on the process's clock in a tick.
        tick = min(settings.timeout_s / (8 + (os.cpu_count() or 1)), 10.0)
        self._ended = threading.Event()
        faulthandler.register(WAKE, file=sys.__stderr__ or sys.stderr, all_threads=True, chain=True)
        signal.setitimer(signal.ITIMER_VIRTUAL, settings.timeout_s + 3 * tick)
        self._thread = threading.Thread(
            target=self._run, args=(settings.timeout_s, tick), name="watch", daemon=True
        )
        self._thread.start()

    def join(self, address: tuple[str, int]) -> None:
        """Adds this process's beats up with those of all that have joined there."""
        from torch.distributed import TCPStore

        self.settings = self.settings._replace(store=address)
        self.store = TCPStore(
            *address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5)
        )

    def stop(self) -> None:
        """Watches no longer."""
        self._ended.set()
        self._thread.join()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        faulthandler.unregister(WAKE)
        self.settings, self.store = Watched(math.inf, Path()), None

    def _run(self, timeout_s: float, tick: float) -> None:
        moved, seen, total = time.monotonic(), (self.beats, 0), 0
        while not self._ended.wait(tick):
            beats = self.beats
            # Its host may be gone.
            with suppress(Exception):
                total = self.store.add("beats", beats - seen[0]) if self.store else total
            if (beats, total) != seen:
                moved, seen = time.monotonic(), (beats, total)
            left = moved + timeout_s - time.monotonic()
            signal.setitimer(signal.ITIMER_VIRTUAL, timeout_s + 3 * tick)
            if left <= 0:
                try:
                    self._stalled(timeout_s - left, tick)
                finally:
                    os._exit(STALLED)

    def _stalled(self, seconds: float, tick: float) -> None:
        """Writes this process's record; the driver then says what is in all of them, and ends the others."""
        self.settings.folder.mkdir(parents=True, exist_ok=True)
        with (self.settings.folder / f"{self.name}.txt").open("w") as file:
            print(
                f"{self.name}: {self.where}; {seconds:.0f} s after: {self.what}",
                file=file,
                flush=True,
            )
            faulthandler.dump_traceback(file, all_threads=True)
            describe, thing = self._shown
            # What it reads other threads may be writing.
            with suppress(Exception):
                print(describe(thing()), file=file)
        # The driver waits for the ranks' records, and these for their end.
        time.sleep(tick * (4 if self.driver else 8))
        if self.driver:
            texts = [
                path.read_text(errors="replace")
                for path in sorted(self.settings.folder.glob("*.txt"))
            ]
            heads = ["  " + text.partition("\n")[0] for text in texts]
            said = say(
                "stalled",
                seconds=self.settings.timeout_s,
                where=self.where,
                folder=self.settings.folder,
            )
            print(said, *heads, sep="\n", file=sys.stderr, flush=True)
            end_children()


WATCH = Watch()
beat = WATCH.beat


@contextmanager
def watching(timeout_s: float | None, folder: Path, name: str) -> Iterator[None]:
    """Watches over the block in the driver's process; None: nothing does."""
    if timeout_s is None:
        yield
        return
    WATCH.start(Watched(timeout_s, folder), name, driver=True)
    try:
        yield
    finally:
        WATCH.stop()


def end_children() -> None:
    """Ends all that descends from this process: what lives on for KILLING_S is killed."""
    import psutil

    children = psutil.Process().children(recursive=True)
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for child in children:
            with suppress(psutil.Error):
                end(child)
        children = psutil.wait_procs(children, timeout=KILLING_S)[1]
