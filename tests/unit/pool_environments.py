"""Environments that do as they are asked, well or badly, for the tests of the pool.

They import little, as env workers' processes load this file.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from custom.envs.guess_number import GuessNumber

COUNT_LOCK = threading.Lock()
SERIAL = itertools.count()
NOW: list[int] = []  # one entry for each call that runs in this process
MOST: list[int] = [0]
RELEASE = threading.Event()


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("I stay here")


class Unreadable:
    def __reduce__(self) -> Any:
        return int, ("no number",)


class EvilError(Exception):
    def __str__(self) -> str:
        raise SystemExit("even my text fails")


class Obedient:
    """An action is a verb and an argument; `closes` is a file that gets a line for each close."""

    def __init__(
        self, closes: str | None = None, hang_in: str = "", build_s: float = 0.0, fail_in: str = ""
    ) -> None:
        self.closes, self.hang_in, self.fail_in = closes, hang_in, fail_in
        self.child: subprocess.Popen[bytes] | None = None
        # Not id(self), which one may have again that is made after this one is gone.
        self.serial = next(SERIAL)
        time.sleep(build_s)
        self.misbehave("build")

    def misbehave(self, where: str) -> None:
        if self.hang_in == where:
            self.do_loop("")
        if self.fail_in == where:
            raise ZeroDivisionError(f"in {where}")

    def reset(self, seed: int | None = None) -> str:
        self.misbehave("reset")
        return f"seed {seed}"

    def step(self, action: str) -> Any:
        verb, _, argument = action.partition(" ")
        result = getattr(self, f"do_{verb}")(argument)
        return (
            result
            if isinstance(result, tuple)
            else (str(result), 0.5, verb == "end", {"verb": verb})
        )

    def close(self) -> None:
        if self.closes is not None:
            with Path(self.closes).open("a") as file:
                file.write("closed\n")
        self.misbehave("close")

    def do_say(self, text: str) -> str:
        return text

    def do_end(self, text: str) -> str:
        return "over"

    def do_sleep(self, seconds: str) -> str:
        time.sleep(float(seconds))
        return "slept"

    def do_count(self, seconds: str) -> str:
        with COUNT_LOCK:
            NOW.append(1)
            MOST[0] = max(MOST[0], len(NOW))
        time.sleep(float(seconds))
        with COUNT_LOCK:
            NOW.pop()
        return "counted"

    def do_loop(self, _: str) -> None:
        while True:
            time.sleep(0.02)

    def do_block(self, _: str) -> str:
        RELEASE.wait()  # in C: no exception gets in before it returns
        return "released"

    def do_raise(self, name: str) -> None:
        kinds = {
            "exit": SystemExit(3),
            "interrupt": KeyboardInterrupt(),
            "evil": EvilError(),
            "long": ValueError("x" * 10**6),
        }
        raise kinds.get(name, RuntimeError(f"told to: {name}"))

    def do_recurse(self, _: str) -> None:
        self.do_recurse(_)

    def do_die(self, how: str) -> None:
        if how == "exit":
            os._exit(7)
        if how == "crash":
            ctypes.string_at(0)
        os.kill(os.getpid(), signal.SIGKILL)

    def do_garbage(self, kind: str) -> Any:
        values: dict[str, Any] = {
            "number": ("text", "much", False, {}),
            "nan": ("text", float("nan"), False, {}),
            "shape": ("text", 1.0),
            "observation": (object(), 1.0, False, {}),
            "info": ("text", 1.0, False, 5),
            "unpicklable": ("text", 1.0, False, {"it": Unpicklable()}),
            "unreadable": ("text", 1.0, False, {"it": Unreadable()}),
            "megabyte": ("y" * 10**6, 1.0, False, {}),
        }
        return values[kind]

    def do_who(self, _: str) -> str:
        return f"{os.getpid()} {self.serial}"

    def do_modules(self, _: str) -> str:
        return " ".join(name for name in ("torch", "ray", "transformers") if name in sys.modules)

    def do_draw(self, _: str) -> str:
        import numpy as np

        return f"{random.random()} {np.random.rand()}"

    def do_child(self, _: str) -> int:
        self.child = subprocess.Popen(["sleep", "1000"])
        return self.child.pid


def hold_environment(environment: Obedient) -> None:
    environment.misbehave("finish")


def reward_fn(trajectory: Any, environment: Obedient) -> float:
    """The number of turns."""
    hold_environment(environment)
    return float(len(trajectory.actions))


class Guarded:
    """Tries what a home may forbid; an action is a verb and an argument."""

    def reset(self, seed: int | None = None) -> str:
        return "ready"

    def step(self, action: str) -> Any:
        verb, _, argument = action.partition(" ")
        return str(getattr(self, f"do_{verb}")(argument)), 0.0, False, {}

    def do_allocate(self, mebibytes: str) -> int:
        return len(bytearray(int(mebibytes) << 20))

    def do_connect(self, port: str) -> str:
        try:
            with socket.create_connection(("127.0.0.1", int(port)), timeout=2):
                return "connected"
        except OSError as error:
            return type(error).__name__

    def do_daemon(self, path: str) -> str:
        """Starts a process in a session of its own, which outlives its parent."""
        code = "import os, sys, time; os.fork() and os._exit(0); os.setsid(); "
        code += "open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
        subprocess.run([sys.executable, "-c", code, path], check=True)
        while not Path(path).exists() or not Path(path).read_text():
            time.sleep(0.01)
        return "started"

    def do_fork(self, how: str) -> str:
        """Forks a child that comes back from the call: first, late, or around Python's hooks."""
        if how == "around":
            pid = ctypes.CDLL(None).fork()
        else:
            pid = os.fork()
        if pid == 0:
            time.sleep(0.0 if how == "first" else 0.1)
            return "of the child"
        time.sleep(0.2 if how == "first" else 0.0)
        return "of the parent"

    def do_speak(self, what: str) -> str:
        """Writes to every socket of the process what nobody asked for, behind a length."""
        texts = {"garbage": b"x", "reply": b"\1" + bytes(7) + b'{"reward": 99.0, "messages": []}'}
        data = texts[what]
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    os.write(int(name), len(data).to_bytes(4, "big") + data)
        return "spoken"

    def do_echo(self, text: str) -> str:
        return text

    def do_die(self, text: str) -> None:
        os._exit(3)

    def do_hang(self, text: str) -> None:
        time.sleep(600)

    def do_compute(self, seconds: str) -> float:
        """Computes so long on processor 0, by its own CPU time."""
        os.sched_setaffinity(0, {0})
        start = time.thread_time()
        while time.thread_time() - start < float(seconds):
            pass
        return time.thread_time() - start


class Lasting(GuessNumber):
    """Lasts nine turns by its own rules."""

    max_turns = 9
