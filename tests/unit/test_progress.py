"""Tests what a long generation shows: lines, a bar, nothing; of this process and of ranks."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from data import play_counts
from data.play_counts import PLAYED, REPORTS, PlayCounts, Played, Reports, add_up, report_to
from tests.conftest import PROJECT
from training.run import progress
from training.run.progress import Progress, TokenRate, describe
from workers.ranks.local_group import LocalWorkerGroup
from workers.ranks.resource_pool import RayResourcePool

# Generates for a second in a terminal, while all that prints does so.
IN_TERMINAL = """
import logging, sys, threading, time
from data.play_counts import Played
from training.run import progress
progress.FIRST_BAR_S = 0.1
logging.basicConfig(level=logging.INFO, format="%(message)s")
ended = [0]
def read():
    ended[0] += 1
    return Played(episodes=64, ended=min(ended[0], 64), tokens=100 * ended[0], oldest_s=7.0)
progress.REPORT_S = 0.02
with progress.Progress("auto", read).showing("step 3"):
    time.sleep(0.3)
    for number in range(20):
        print("printed", number, "whole")
        logging.info("logged %d whole", number)
        print("half of ", end="")
        time.sleep(0.02)
        print("a line", number, flush=True)
    print("rest", end="")
print(" and its end")
"""


class Running:
    def __init__(self, started_at: float) -> None:
        self.started_at = started_at


class Loop:
    def __init__(self) -> None:
        self.running: dict[int, Running] = {}


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_BAR_S", 0.02)
    monkeypatch.setattr(progress, "LINE_S", 0.05)


def test_counts_are_of_the_episodes_that_play_together() -> None:
    counts = PlayCounts()
    loop = Loop()
    assert counts.read() == Played()
    counts.begin(loop, 8)
    counts.ended += 3
    loop.running = {4: Running(time.perf_counter() - 9), 5: Running(time.perf_counter())}
    played = counts.read()
    assert (played.episodes, played.ended) == (8, 3) and 9 <= played.oldest_s < 10
    # A second batch beside the five that are left, as with asynchronous generation.
    counts.begin(loop, 4)
    assert (counts.episodes, counts.ended) == (9, 0)
    counts.ended += 9
    counts.begin(loop, 2)
    assert (counts.episodes, counts.ended) == (2, 0)
    del loop
    assert counts.read().oldest_s == 0


def test_a_loop_that_is_gone_and_processes_without_any_add_up_to_nothing() -> None:
    assert add_up([]) == Played()
    parts = [Played(4, 1, 10, 3.0), Played(5, 5, 20, 0.0)]
    assert add_up(parts) == Played(9, 6, 30, 3.0)


def test_the_rate_is_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    rate = TokenRate()
    assert rate.add(1000) == 0
    seen = []
    for tokens in (1100, 2100, 2100, 2100, 2100):
        now[0] += 10
        seen.append(rate.add(tokens))
    assert seen == [10.0, 55.0, pytest.approx(36.67, abs=0.01), pytest.approx(33.33, abs=0.01), 0.0]


def test_a_long_generation_has_lines_and_a_short_one_none(
    soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    shown = Progress("auto", lambda: Played(8, 2, 100, 83.2))
    with shown.showing("step 1"):
        pass
    assert not caplog.messages and shown._thread is None
    with shown.showing("step 2"):
        time.sleep(0.18)
    assert 1 <= len(caplog.messages) <= 4
    assert caplog.messages[0] == ("step 2: 2 of 8 episodes, 0 tokens/s, the slowest runs for 83 s")
    assert describe(Played(8, 8, 0, 0.0), 1234.5) == "8 of 8 episodes, 1,234 tokens/s"


def test_off_shows_nothing_and_starts_no_thread(
    soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    before = set(threading.enumerate())
    with Progress("off", lambda: Played(8)).showing("step 1"):
        assert not set(threading.enumerate()) - before
        time.sleep(0.1)
    assert not caplog.messages


def test_generations_side_by_side_share_a_line(
    soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    shown = Progress("lines", lambda: Played(8))
    with shown.showing("step 1"), shown.showing("step 2"), shown.showing("step 2"):
        time.sleep(0.12)
    assert caplog.messages[0].startswith("step 1, step 2: ")
    assert shown._thread is None and not shown._labels


def test_what_fails_while_it_shows_costs_the_show_alone(
    soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    def read() -> Played:
        raise RuntimeError("no counts")

    shown = Progress("lines", read)
    with shown.showing("step 1"):
        time.sleep(0.1)
    assert caplog.messages == ["the progress of this generation is not shown"]
    with pytest.raises(ZeroDivisionError), shown.showing("step 2"):
        raise ZeroDivisionError
    assert shown._thread is None


def in_terminal(code: str, folder: Path, **variables: str) -> str:
    """Runs code in a terminal; returns all that it wrote there."""
    (folder / "shown.py").write_text(code)
    driver, terminal = pty.openpty()
    # Rows and columns.
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "TERM": "xterm"}
    program = subprocess.Popen(
        [sys.executable, folder / "shown.py"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment | variables,
    )
    os.close(terminal)
    output = b""
    while True:
        try:
            part = os.read(driver, 65536)
        except OSError:
            break
        if not part:
            break
        output += part
    os.close(driver)
    assert program.wait(timeout=30) == 0, output.decode()
    return output.decode()


def on_screen(output: str) -> list[str]:
    """Returns the lines that stand on a screen in the end: a carriage return writes anew."""
    lines = []
    for line in output.split("\n"):
        screen = ""
        for part in line.split("\r"):
            part = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", part)
            screen = part + screen[len(part) :]
        lines.append(screen.rstrip())
    return lines


@pytest.mark.seconds
def test_a_bar_in_a_terminal_leaves_every_line_whole(tmp_path: Path) -> None:
    output = in_terminal(IN_TERMINAL, tmp_path)
    assert re.search(r"step 3: +\d+%\|.*/64 \[00:0\d, \d[\d,]* tokens/s, slowest 7 s\]", output)
    wanted = []
    for number in range(20):
        wanted += [
            f"printed {number} whole",
            f"logged {number} whole",
            f"half of a line {number}",
        ]
    wanted.append("rest and its end")
    assert [line for line in on_screen(output) if line] == wanted


@pytest.mark.seconds
@pytest.mark.parametrize("how", ["a file", "a terminal that is dumb"])
def test_there_is_no_bar_where_it_would_leave_fragments(tmp_path: Path, how: str) -> None:
    if how == "a file":
        (tmp_path / "shown.py").write_text(IN_TERMINAL)
        output = subprocess.run(
            [sys.executable, tmp_path / "shown.py"],
            env=os.environ | {"PYTHONPATH": str(PROJECT)},
            capture_output=True,
            text=True,
            check=True,
        )
        text = output.stdout + output.stderr
        assert "\r" not in text
    else:
        text = in_terminal(IN_TERMINAL, tmp_path, TERM="dumb")
    assert "%|" not in text and "printed 19 whole" in text


def test_ranks_report_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play_counts, "REPORT_S", 0.02)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = ("127.0.0.1", store.port)
    reports = Reports()
    reports.add(address, 2)
    # Before all have reported there is nothing to tell.
    assert reports.read() == Played()
    store.set("played/1", json.dumps([8, 2, 500, 4.0]))
    monkeypatch.setattr(PLAYED, "episodes", 8)
    monkeypatch.setattr(PLAYED, "ended", 5)
    monkeypatch.setattr(PLAYED, "tokens", 100)
    monkeypatch.setattr(PLAYED, "_loop", None)
    report_to(address, 0)
    deadline = time.monotonic() + 5
    while reports.read() == Played() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert reports.read() == Played(16, 7, 600, 4.0)
    reports.clear()
    # This process's own, where it has no ranks.
    assert reports.read() == Played(8, 5, 100, 0.0)


def test_ranks_of_a_run_before_do_not_count_where_this_process_plays() -> None:
    """A trainer that was not shut down left them; they answer, with numbers that stand still."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("played/0", json.dumps([8, 8, 500, 0.0]))
    REPORTS.add(("127.0.0.1", store.port), 1)
    assert REPORTS.read().episodes == 8
    pool = RayResourcePool((1,), use_gpu=False)
    LocalWorkerGroup.start(pool, {})
    assert REPORTS.read() == PLAYED.read()


def test_a_store_that_is_gone_has_nothing_to_tell() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reports = Reports()
    reports.add(("127.0.0.1", store.port), 1)
    store.set("played/0", json.dumps([8, 2, 500, 4.0]))
    assert reports.read().episodes == 8
    del store
    assert reports.read() in (Played(), Played(8, 2, 500, 4.0))


def test_a_process_without_standard_error_is_watched_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert not progress.somebody_watches()
