"""What a run says of the machine that it starts on."""

from __future__ import annotations

import os
import signal
import sys

import psutil
import pytest
import torch

from training.config.schema.trainer import TrainerConfig
from training.run.ray_cluster import has_gpus, warn_of_busy_cores
from training.run.signals import EndingSignals, SignalsSeen


@pytest.mark.parametrize(
    ("threads", "used", "said"), [(4, 60.0, True), (4, 5.0, False), (1, 90.0, False)]
)
def test_threads_that_outnumber_the_free_cores_are_named(
    monkeypatch, caplog, threads, used, said
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: used)
    warn_of_busy_cores()
    assert ("OMP_NUM_THREADS=2" in caplog.text) == said


def test_a_postponed_signal_waits_for_the_step_and_a_second_one_does_not() -> None:
    signals, before = EndingSignals(), signal.getsignal(signal.SIGINT)
    signals.postpone = lambda: True
    # A shell may have started the tests with it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signals.install()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        signals.close()
        os.kill(os.getpid(), signal.SIGINT)
        # A job's scheduler and its own supervisor both say it.
        signals.open = True
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        signals.received_at -= 10
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, before if number == signal.SIGINT else signal.SIG_DFL)


def test_a_signal_ends_the_run_also_where_nobody_reads_its_errors_any_more() -> None:
    """As with `2>&1 | tee log`, which Ctrl-C ends first."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    errors = os.dup(2)
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
    try:
        with EndingSignals() as signals, pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT
    finally:
        os.dup2(errors, 2)
        for file in (errors, writer):
            os.close(file)
        signal.signal(signal.SIGINT, before)


def test_ranks_have_gpus_where_the_config_says_so_or_this_machine_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        given = [
            has_gpus(TrainerConfig(device=device, launcher="local"))
            for device in ("cuda", "cpu", None)
        ]
        assert given == [True, False, there]


def test_a_signal_is_seen_also_where_what_its_handler_raised_was_lost(monkeypatch) -> None:
    class Ending:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    lost: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: lost.append(told.exc_type))
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
    try:
        with SignalsSeen() as seen:
            assert signal.SIGTERM not in seen
            ending = Ending()
            del ending
            assert lost == [SystemExit]
            assert signal.SIGTERM in seen and signal.SIGINT not in seen
    finally:
        signal.signal(signal.SIGTERM, before)
