"""Runs a Python snippet within limits: the child's side of PythonTool, started as `python -I -S python_snippet.py …`.

Invariant: it limits the process, and leaves the network where it may, before it executes `snippet.py` of the working
directory. The value of a last expression is printed as the interactive prompt would. This is no sandbox against an
attacker: files that the user may read can be read (but for /proc); the guard of file writes is Python's own audit
hook, which code that sets out to break the interpreter gets around. For adversarial code use a container or a virtual
machine.
"""

import ast
import ctypes
import linecache
import os
import resource
import signal
import sys
import traceback
from typing import Any

CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG = 1
DENIED = (
    *("socket.", "ctypes.", "subprocess.", "pty.", "resource.setrlimit", "signal.pthread_kill", "shutil."),
    *("os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill"),
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate"),
    *("os.setxattr", "os.removexattr", "os.utime", "sys.addaudithook"),
)


def limit_process(cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Limits CPU time (s), address space, written files (bytes) and open files (64), and forbids core dumps."""
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for which, value in limits.items():
        resource.setrlimit(which, (value, value))


def leave_network_and_processes() -> bool:
    """Moves to new namespaces, in which there is no network and which take every child along when they end.

    It returns whether that worked: a machine may forbid it. The audit hook denies sockets and processes all the same.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID) == 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        return True
    return libc.unshare(CLONE_NEWNET | CLONE_NEWPID) == 0


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends; where that has happened already it ends here."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def continue_in_child() -> None:
    """Forks, so that the new process namespace begins; the parent hands the child's end on."""
    child = os.fork()
    if child == 0:
        # In its own process namespace it sees no parent.
        die_with_parent(0)
        return
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    # It ends by the same signal, so that the caller sees it.
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def guard(workdir: str) -> None:
    """Denies network, processes and every change of files outside of `workdir`."""
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    realpath, fspath, denied = os.path.realpath, os.fsdecode, DENIED

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(denied):
            raise PermissionError(f"{event} is not allowed in this tool")
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = realpath(fspath(arguments[0]))
            outside = not path.startswith(workdir + "/") and path != "/dev/null"
            if path.startswith("/proc/") or (outside and arguments[2] & writing):
                raise PermissionError(f"opening {path} is not allowed in this tool")

    sys.addaudithook(hook)


def execute(source: str) -> int:
    """Runs the source as `__main__` and returns the exit status: 1 after an exception, whose traceback is printed."""
    linecache.cache["snippet.py"] = (len(source), None, source.splitlines(True), "snippet.py")
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        tree = ast.parse(source, "snippet.py")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "snippet.py", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "snippet.py", "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        report(error)
        return 1
    return 0


def report(error: BaseException) -> None:
    """Prints the traceback with the snippet's own lines only: where this runs is no business of the model's."""
    shown = traceback.TracebackException.from_exception(error, limit=-50)
    shown.stack = traceback.StackSummary.from_list([f for f in shown.stack if f.filename == "snippet.py"][-5:])
    sys.stdout.flush()
    print("".join(shown.format(chain=False)), end="", file=sys.stderr)


def main() -> None:
    """Runs the snippet; arguments: the caller's process, CPU seconds, bytes of memory, bytes of a written file."""
    caller, cpu_s, memory_bytes, file_bytes = map(int, sys.argv[1:5])
    die_with_parent(caller)
    if leave_network_and_processes():
        continue_in_child()
    limit_process(cpu_s, memory_bytes, file_bytes)
    with open("snippet.py", encoding="utf-8") as file:
        source = file.read()
    sys.argv = ["snippet.py"]
    guard(os.getcwd())
    status = execute(source)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that the snippet left do not hold it up.
    os._exit(status)


if __name__ == "__main__":
    main()
