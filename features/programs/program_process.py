"""Runs in the process of a program, which a fork server has forked (fork_server_process.py).

It becomes the program: the words of a command, or a Python file behind the modules that are already
imported (`programs.preload`), the first requests of SDKs included (warm_up.py). It runs under the
interpreter that a program's command names, on the standard library alone.
"""

import atexit
import os
import resource
import runpy
import sys
import threading
import traceback
from types import TracebackType
from typing import Any

WARM_UP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "warm_up.py")
# Files whose frames stand before a script's own; newer interpreters freeze runpy.
RUNNERS = (__file__, runpy.__file__, "<frozen runpy>")


def prepare(modules: list[str]) -> None:
    """Makes the first requests of the SDKs among the modules, which have been imported."""
    if modules:
        runpy.run_path(WARM_UP)["warm_up"]()


def run(request: dict[str, Any], files: list[int]) -> int:
    """Becomes a program; returns its exit code, where that is a Python file.

    Args:
        request: `argv`, `env`, `folder`, `forks` (a Python file is run here), and the bounds of
            `limit`.
        files: its standard input, output and error.
    """
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    limit(request)
    if request["folder"]:
        os.chdir(request["folder"])
    if not request["forks"]:
        os.execvpe(request["argv"][0], request["argv"], request["env"])
    try:
        return run_script(request["argv"], request["env"])
    finally:
        end_as_interpreter()


def run_script(argv: list[str], env: dict[str, str]) -> int:
    """Runs a Python file as the main program of this process; returns its exit code."""
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:] = argv
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as ending:
        if isinstance(ending.code, int):
            return ending.code & 0xFF
        if ending.code is not None:
            print(ending.code, file=sys.stderr)
            return 1
    except Exception as error:
        traceback.print_exception(type(error), error, own_frames(error))
        return 1
    return 0


def own_frames(error: BaseException) -> TracebackType | None:
    """Returns a traceback without its first frames, which run the script; None: it has no more.

    A file that cannot be compiled has none.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in RUNNERS:
        trace = trace.tb_next
    return trace


def end_as_interpreter() -> None:
    """Does what an interpreter does at its end: waits for threads, calls what asked to be called.

    All but taking apart what is loaded, which costs time. What fails here changes no exit code.
    """
    try:
        # Nothing else joins the threads that are no daemons.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()


def limit(request: dict[str, Any]) -> None:
    """Bounds the memory and the open files of this process, and of what it starts each."""
    bounds = {
        resource.RLIMIT_DATA: request["memory_bytes"],
        resource.RLIMIT_NOFILE: request["open_files"],
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in bounds.items():
        if most is not None:
            _, hard = resource.getrlimit(kind)
            if hard != resource.RLIM_INFINITY:
                most = min(most, hard)
            resource.setrlimit(kind, (most, most))
