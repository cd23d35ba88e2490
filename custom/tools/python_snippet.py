"""Runs a Python snippet within limits: the child's side of PythonTool, started as `python -I -S python_snippet.py …`.

Invariant: every wall that the machine allows stands before the snippet is executed. From the outside in:

    namespaces   no network, no other processes, and a root of its own: read-only, with nothing but the interpreter's
                 files in it and a folder of limited size          (Linux 5.12 and newer with user namespaces)
    Landlock     only the interpreter's files are read, only the working folder is written     (Linux 5.13 and newer)
    seccomp      no sockets, no new processes, no signals, no modes of files        (Linux on x86-64 and ARM, 64 bit)

Elsewhere only time, memory and output are limited. Where namespaces are forbidden (Docker's default), the total size of
the folder is not limited, names, sizes and times of files are seen, and times and groups can be changed.
`custom/tools/walls.py` finds out which walls stand. A hole in the kernel is a hole in all of them: for code of people
who attack use a virtual machine.
"""

import ast
import contextlib
import ctypes
import linecache
import os
import resource
import signal
import struct
import sys
import tomllib
import traceback
from typing import Any

# linux/sched.h: new namespaces of users, mounts, host names, message queues, processes and networks.
NAMESPACES = 0x10000000 | 0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, AT_RECURSIVE, MNT_DETACH = (
    1,
    22,
    38,
    0x8000,
    2,
)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC = 1, 2, 4, 8, 4096, 1 << 14
# linux/landlock.h: execute, read a file and read a folder; all that a file (not a folder) can have.
READ, FILE = 0b1101, 0b100_0000_0000_0111
# What the interpreter reads and what seccomp refuses; read before any wall stands.
with open(__file__.removesuffix(".py") + ".toml", "rb") as table:
    facts = tomllib.load(table)
SHOWN, CALLS = facts["shown"], facts["calls"]
# By machine and bytes of a pointer: which of a call's numbers is its own, and AUDIT_ARCH of linux/audit.h.
MACHINES = {("x86_64", 8): (0, 0xC000003E), ("aarch64", 8): (1, 0xC00000B7)}


def call(name: str, *arguments: Any) -> int:
    """Calls a function of the C library; OSError where it fails."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    result = function(
        *(ctypes.c_long(value) if isinstance(value, int) else value for value in arguments)
    )
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
    return result


def mount(source: str, target: str, flags: int, kind: str = "", options: str = "") -> None:
    call("mount", os.fsencode(source), os.fsencode(target), kind.encode(), flags, options.encode())


def limit_process(cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Limits CPU time (s), address space, written files (bytes) and open files (64), and forbids core dumps."""
    for name, value in (
        ("CPU", cpu_s),
        ("AS", memory_bytes),
        ("FSIZE", file_bytes),
        ("NOFILE", 64),
        ("CORE", 0),
    ):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def enter_namespaces() -> None:
    """Moves to new namespaces without a network; the next process forked is the first of its process namespace.

    OSError where the machine forbids some of it.
    """
    uid, gid = os.getuid(), os.getgid()
    call("unshare", NAMESPACES)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def continue_in_child() -> None:
    """Forks, so that the new process namespace begins; the child dies with its parent, which hands its end on."""
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        # It ends by the same signal, so that the caller sees it.
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code & 0xFF)
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)


def interpreter_paths() -> list[str]:
    """The files and folders that the interpreter reads; none lies in another."""
    wanted = (*sys.path, f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64", *SHOWN)
    found = {
        name(path)
        for path in wanted
        for name in (os.path.normpath, os.path.realpath)
        if os.path.exists(path)
    }
    return [
        path for path in sorted(found) if not any(path.startswith(f"{other}/") for other in found)
    ]


def change_root(disk_bytes: int, root: str = "/proc") -> None:
    """Moves to a root of its own: the interpreter's files, read-only, and a working folder in memory of `disk_bytes`.

    It is built over /proc, which is there and which no other wall lets a snippet read: half a root, where some mount is
    forbidden, shows nothing.
    """
    mount("tmpfs", root, MS_NOSUID | MS_NODEV, "tmpfs", "size=1m,nr_inodes=1000,mode=755")
    for path in interpreter_paths():
        os.makedirs(root + (path if os.path.isdir(path) else os.path.dirname(path)), exist_ok=True)
        if not os.path.isdir(path):
            open(root + path, "x").close()
        mount(path, root + path, MS_BIND | MS_REC)
    os.makedirs(f"{root}/tmp/snippet")
    # mount_setattr, for the mounts below, too; its attributes have the numbers of these flags.
    call(
        "syscall",
        442,
        0,
        root.encode(),
        AT_RECURSIVE,
        struct.pack("QQQQ", MS_RDONLY | MS_NOSUID, 0, 0, 0),
        32,
    )
    size = f"size={disk_bytes},nr_inodes=4096,mode=700"
    mount("tmpfs", f"{root}/tmp/snippet", MS_NOSUID | MS_NODEV | MS_NOEXEC, "tmpfs", size)
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)
    os.chdir("/tmp/snippet")


def restrict_files() -> None:
    """Has Landlock deny every file but the interpreter's, to be read, and those of the folder it is in."""
    readable, writable = interpreter_paths(), [os.getcwd(), "/dev/null"]
    version = call("syscall", 444, None, 0, 1)
    rights = (1 << min(12 + version, 15)) - 1
    ruleset = call("syscall", 444, struct.pack("Q", rights), 8, 0)
    for path in (*readable, *writable):
        descriptor = os.open(path, os.O_PATH)
        allowed = (rights if path in writable else READ) & (rights if os.path.isdir(path) else FILE)
        call("syscall", 445, ruleset, 1, struct.pack("=Qi", allowed & rights, descriptor), 0)
    call("syscall", 446, ruleset, 0)


def refuse_calls() -> None:
    """Has seccomp say of CALLS that there are none, but for threads and for what a process does to itself."""
    column, architecture = MACHINES[os.uname().machine, struct.calcsize("P")]
    numbers = {name: on[column] for name, on in CALLS.items() if len(on) > column}
    load, equal, at_least, any_bit = 0x20, 0x15, 0x35, 0x45
    allow, refuse = (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x50026)
    # Each is (code, steps to jump if it holds, steps if not, value); a call's architecture is at 4, its number at 0.
    program = [
        (load, 0, 0, 4),
        (equal, 1, 0, architecture),
        refuse,
        (load, 0, 0, 0),
        (at_least, 0, 1, 1 << 30),
        refuse,
    ]
    # The first argument, at 16, is the flags of clone (CLONE_THREAD), and the process of prlimit64, 0 for this one.
    # The second, at 24, is the command of fcntl; those with bit 8 have other processes signalled.
    own, owner = (16, equal, 0, allow, refuse), (24, any_bit, 8, refuse, allow)
    rules = {"clone": (16, any_bit, 0x10000, allow, refuse), "prlimit64": own, "fcntl": owner}
    for name, (argument, test, value, *answers) in rules.items():
        program += [
            (equal, 0, 4, numbers.pop(name)),
            (load, 0, 0, argument),
            (test, 0, 1, value),
            *answers,
        ]
    for number in numbers.values():
        program += [(equal, 0, 1, number), refuse]
    code = ctypes.create_string_buffer(
        b"".join(struct.pack("HBBI", *step) for step in (*program, allow))
    )
    call(
        "prctl",
        PR_SET_SECCOMP,
        2,
        struct.pack("HP", len(program) + 1, ctypes.addressof(code)),
        0,
        0,
    )


def raise_walls(caller: int, disk_bytes: int) -> None:
    """Has the kernel confine this process as far as it can; where it has a root of its own, in another folder."""
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != caller:
        os._exit(1)
    with contextlib.suppress(OSError):
        enter_namespaces()
        continue_in_child()
        change_root(disk_bytes)
    # Version 3 of linux/capability.h, for this process; and three empty sets.
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("capset", struct.pack("=Ii", 0x20080522, 0), bytes(24))
    for wall in (restrict_files, refuse_calls):
        with contextlib.suppress(OSError, KeyError):
            wall()
    os.closerange(3, 256)


def execute(source: str) -> int:
    """Runs the source as `__main__` and returns the exit status: 1 after an exception, whose traceback is printed."""
    linecache.cache["snippet.py"] = (len(source), None, source.splitlines(True), "snippet.py")
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        tree = ast.parse(source, "snippet.py")
        last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
        exec(compile(tree, "snippet.py", "exec"), names)
        # As at Python's prompt, its value is shown.
        exec(compile(ast.Interactive(last), "snippet.py", "single"), names)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        # Without the line below: where this runs is no business of the model's.
        own = error.__traceback__ and error.__traceback__.tb_next
        traceback.print_exception(error.with_traceback(own), limit=-5, chain=False)
        return 1
    return 0


def main() -> None:
    """Runs the snippet.

    Arguments: the caller's process, CPU seconds, bytes of memory, of a written file and of all of them.
    """
    caller, cpu_s, memory_bytes, file_bytes, disk_bytes = map(int, sys.argv[1:6])
    with open("snippet.py", encoding="utf-8") as file:
        source = file.read()
    if sys.platform == "linux":
        raise_walls(caller, disk_bytes)
    limit_process(cpu_s, memory_bytes, file_bytes)
    sys.argv = ["snippet.py"]
    os.environ["HOME"] = os.getcwd()
    # Threads that the snippet left do not hold it up; python's -u has written all that it printed.
    os._exit(execute(source))


if __name__ == "__main__":
    main()
