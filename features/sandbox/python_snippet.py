"""Runs a Python snippet within limits: the child's side of PythonTool, a program of its own.

It is started as `python -I -S python_snippet.py …` and imports nothing but the standard library.
Invariant: every wall that the machine allows stands before the snippet is executed. From the
outside in:

    namespaces   no network, no other processes, and a root of its own: read-only, with nothing but
                 the interpreter's files in it and a folder of limited size
                                                 (Linux 5.12 and newer with user namespaces)
    Landlock     only the interpreter's files are read, only the working folder is written
                                                 (Linux 5.13 and newer)
    seccomp      no calls but those that a snippet needs: no sockets, no new processes, no signals
                 and nothing else about other processes, no queues, no modes and attributes of files
                                                 (Linux on x86-64 and ARM, 64 bit)

Elsewhere only time, memory and output are limited. Where namespaces are forbidden (Docker's
default), the total size of the folder is not limited, and names, sizes and times of files are seen.
A snippet cannot take back that it dies with its caller: that call is refused, too.
`features/sandbox/walls.py` finds out which walls stand. A hole in
the kernel is a hole in all of them: for code of people who attack use a virtual machine.
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
from typing import Any, NamedTuple

# linux/sched.h: new namespaces of users, mounts, host names, message queues, processes and
# networks.
NAMESPACES = 0x10000000 | 0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000

# linux/prctl.h and linux/seccomp.h.
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_GET_NAME = 16
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2

# linux/mount.h and linux/fcntl.h.
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 1 << 14
MNT_DETACH = 2
AT_RECURSIVE = 0x8000

# Calls without a function in the C library; their numbers are the same on all machines.
SYS_MOUNT_SETATTR = 442
SYS_LANDLOCK_CREATE_RULESET = 444
SYS_LANDLOCK_ADD_RULE = 445
SYS_LANDLOCK_RESTRICT_SELF = 446

# linux/landlock.h: ask for the version; a rule about a file or all below a folder.
LANDLOCK_CREATE_RULESET_VERSION = 1
LANDLOCK_RULE_PATH_BENEATH = 1
# Rights: execute, read a file and read a folder; all that a file (not a folder) can have.
READ = 0b1101
FILE = 0b100_0000_0000_0111

# linux/bpf_common.h: load a word of the call's description; compare it with a value; return one.
BPF_LOAD = 0x20
BPF_IF_EQUAL = 0x15
BPF_IF_AT_LEAST = 0x35
BPF_IF_ANY_BIT = 0x45
BPF_RETURN = 0x06

# linux/seccomp.h: where a call's number, its architecture and its arguments are described.
NUMBER_OFFSET = 0
ARCHITECTURE_OFFSET = 4
FIRST_ARGUMENT = 16
SECOND_ARGUMENT = 24
# linux/sched.h: a new thread of this process.
CLONE_THREAD = 0x10000
# linux/fcntl.h: copies of descriptors, their flags, and locks. The others have other processes
# signalled, or hold up those that open a file.
FCNTL_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030)
# asm-generic/ioctls.h: whether this is a terminal and how large, bytes to read, and whether a
# descriptor waits and is closed. The others change the flags of files, or signal other processes.
IOCTL_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# linux/socket.h and linux/net.h: a stream, with or without its two flags. One of datagrams could
# send to other sockets.
AF_UNIX = 1
STREAM_TYPES = (1, 0x801, 0x80001, 0x80801)
# Calls of x86-64's 32-bit interface have this bit set in their number.
X32_BIT = 1 << 30

# By machine and bytes of a pointer: the column of CALLS, and AUDIT_ARCH of linux/audit.h.
MACHINES = {("x86_64", 8): (0, 0xC000003E), ("aarch64", 8): (1, 0xC00000B7)}

# The files of the interpreter and the calls that seccomp allows; read before any wall stands.
with open(__file__.removesuffix(".py") + ".toml", "rb") as table_file:
    _TABLE = tomllib.load(table_file)
SHOWN = _TABLE["shown"]
CALLS = _TABLE["calls"]


def call(name: str, *arguments: Any) -> int:
    """Calls a function of the C library; OSError where it fails."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    # As wide as the kernel's arguments; ctypes would make an int of 32 bits of them.
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = function(*wide)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
    return result


def mount(source: str, target: str, flags: int, kind: str = "", options: str = "") -> None:
    """Mounts a file system, or binds a file or folder, at `target`."""
    call("mount", os.fsencode(source), os.fsencode(target), kind.encode(), flags, options.encode())


def limit_process(cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Limits CPU time, address space, written files and open files; forbids core dumps.

    Args:
        cpu_s: seconds.
        memory_bytes, file_bytes: of the address space, and of each file that is written.
    """
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


# --- Namespaces ---


def enter_namespaces() -> None:
    """Moves to new namespaces without a network.

    The next process forked is the first of its process namespace. OSError where the machine forbids
    some of it.
    """
    uid = os.getuid()
    gid = os.getgid()
    call("unshare", NAMESPACES)
    settings = {
        "setgroups": "deny",
        "uid_map": f"{uid} {uid} 1",
        "gid_map": f"{gid} {gid} 1",
    }
    for name, text in settings.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def continue_in_child() -> None:
    """Forks, so that the new process namespace begins.

    The child goes on and dies with its parent, which waits for it and ends as it ended.
    """
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        # It ends by the same signal, so that the caller sees it.
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code & 0xFF)
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)


def interpreter_paths() -> list[str]:
    """Returns the files and folders that the interpreter reads; none lies in another."""
    candidates = (*sys.path, f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64", *SHOWN)
    existing = set()
    for path in candidates:
        if os.path.exists(path):
            existing.add(os.path.normpath(path))
            existing.add(os.path.realpath(path))
    outermost = []
    for path in sorted(existing):
        if not any(path.startswith(f"{other}/") for other in existing):
            outermost.append(path)
    return outermost


def change_root(disk_bytes: int, root: str = "/proc") -> None:
    """Moves to a root of its own: the interpreter's files, read-only, and a working folder.

    The folder is in memory and takes `disk_bytes`. The root is built over /proc, which is there and
    which no other wall lets a snippet read: half a root, where some mount is forbidden, shows
    nothing.
    """
    mount("tmpfs", root, MS_NOSUID | MS_NODEV, "tmpfs", "size=1m,nr_inodes=1000,mode=755")
    for path in interpreter_paths():
        if os.path.isdir(path):
            os.makedirs(root + path, exist_ok=True)
        else:
            os.makedirs(root + os.path.dirname(path), exist_ok=True)
            open(root + path, "x").close()
        mount(path, root + path, MS_BIND | MS_REC)
    working_folder = f"{root}/tmp/snippet"
    os.makedirs(working_folder)
    make_read_only(root)
    size = f"size={disk_bytes},nr_inodes=4096,mode=700"
    mount("tmpfs", working_folder, MS_NOSUID | MS_NODEV | MS_NOEXEC, "tmpfs", size)
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)
    os.chdir("/tmp/snippet")


def make_read_only(root: str) -> None:
    """Makes the mount at `root`, and all mounts below it, read-only."""
    # struct mount_attr: set, clear, propagation, user namespace. Its attributes have the numbers of
    # mount's flags.
    attributes = struct.pack("QQQQ", MS_RDONLY | MS_NOSUID, 0, 0, 0)
    call(
        "syscall",
        SYS_MOUNT_SETATTR,
        0,
        root.encode(),
        AT_RECURSIVE,
        attributes,
        len(attributes),
    )


# --- Landlock ---


def restrict_files() -> None:
    """Denies by Landlock every file but the interpreter's, to be read, and the working folder's.

    Where it knows of them, it denies ports and signals to other processes, too.
    """
    readable = interpreter_paths()
    writable = [os.getcwd(), "/dev/null"]
    version = call("syscall", SYS_LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_CREATE_RULESET_VERSION)
    # All rights that this version knows, of those that are about files.
    rights = (1 << min(12 + version, 15)) - 1
    # Version 4 knows ports of TCP, and 6 signals to others and their sockets without a file.
    attributes = struct.pack("Q", rights)
    if version >= 6:
        attributes = struct.pack("QQQ", rights, 0b11, 0b11)
    elif version >= 4:
        attributes = struct.pack("QQ", rights, 0b11)
    ruleset = call("syscall", SYS_LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    for path in (*readable, *writable):
        allowed = rights
        if path not in writable:
            allowed &= READ
        if not os.path.isdir(path):
            allowed &= FILE
        descriptor = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", allowed, descriptor)
        call("syscall", SYS_LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, rule, 0)
    call("syscall", SYS_LANDLOCK_RESTRICT_SELF, ruleset, 0)


# --- Seccomp ---


class Instruction(NamedTuple):
    """Holds an instruction of the filter: how many to jump if it holds, and if not."""

    code: int
    jump_if: int
    jump_unless: int
    value: int


# The answers: go on; say that there is no such call (ENOSYS).
ALLOW = Instruction(BPF_RETURN, 0, 0, 0x7FFF0000)
REFUSE = Instruction(BPF_RETURN, 0, 0, 0x50026)


class ArgumentCheck(NamedTuple):
    """Holds what an argument of a call must be: one of these values, or what the test says."""

    argument: int
    values: tuple[int, ...]
    test: int = BPF_IF_EQUAL


# A call that is allowed is allowed with these arguments only.
ARGUMENT_CHECKS = {
    # Its flags.
    "clone": [ArgumentCheck(FIRST_ARGUMENT, (CLONE_THREAD,), test=BPF_IF_ANY_BIT)],
    # The process: 0 is this one.
    "prlimit64": [ArgumentCheck(FIRST_ARGUMENT, (0,))],
    # Not that its caller's end is no longer its own.
    "prctl": [ArgumentCheck(FIRST_ARGUMENT, (PR_SET_NAME, PR_GET_NAME))],
    "fcntl": [ArgumentCheck(SECOND_ARGUMENT, FCNTL_COMMANDS)],
    "ioctl": [ArgumentCheck(SECOND_ARGUMENT, IOCTL_REQUESTS)],
    "socketpair": [
        ArgumentCheck(FIRST_ARGUMENT, (AF_UNIX,)),
        ArgumentCheck(SECOND_ARGUMENT, STREAM_TYPES),
    ],
}


def check_argument(check: ArgumentCheck) -> list[Instruction]:
    """Returns the part of the filter that goes on where the argument passes, and refuses."""
    part = [Instruction(BPF_LOAD, 0, 0, check.argument)]
    for index, value in enumerate(check.values):
        # Past the other values and the refusal.
        part.append(Instruction(check.test, len(check.values) - index, 0, value))
    part.append(REFUSE)
    return part


def filter_program(numbers: dict[str, int], architecture: int) -> list[Instruction]:
    """Returns the filter that refuses all but these calls, by name, of this architecture."""
    program = [
        Instruction(BPF_LOAD, 0, 0, ARCHITECTURE_OFFSET),
        Instruction(BPF_IF_EQUAL, 1, 0, architecture),
        REFUSE,
        Instruction(BPF_LOAD, 0, 0, NUMBER_OFFSET),
        Instruction(BPF_IF_AT_LEAST, 0, 1, X32_BIT),
        REFUSE,
    ]
    for name, number in numbers.items():
        answer = []
        for check in ARGUMENT_CHECKS.get(name, []):
            answer += check_argument(check)
        answer.append(ALLOW)
        program += [Instruction(BPF_IF_EQUAL, 0, len(answer), number), *answer]
    program.append(REFUSE)
    return program


def refuse_calls() -> None:
    """Makes seccomp answer every call but CALLS as if it did not exist.

    KeyError on a machine whose numbers are unknown.
    """
    column, architecture = MACHINES[os.uname().machine, struct.calcsize("P")]
    numbers = {}
    for name, by_machine in CALLS.items():
        if len(by_machine) > column:
            numbers[name] = by_machine[column]
    program = filter_program(numbers, architecture)
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    description = struct.pack("HP", len(program), ctypes.addressof(buffer))
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, description, 0, 0)


# --- The program ---


def raise_walls(caller: int, disk_bytes: int) -> None:
    """Makes the kernel confine this process as far as it can.

    Where it has a root of its own, it is in another folder afterwards.
    """
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    # The caller may have ended before that.
    if os.getppid() != caller:
        os._exit(1)
    with contextlib.suppress(OSError):
        enter_namespaces()
        continue_in_child()
        change_root(disk_bytes)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # Version 3 of linux/capability.h, for this process; and three empty sets.
    call("capset", struct.pack("=Ii", 0x20080522, 0), bytes(24))
    for wall in (restrict_files, refuse_calls):
        with contextlib.suppress(OSError, KeyError):
            wall()
    os.closerange(3, 256)


def execute(source: str) -> int:
    """Runs the source as `__main__`, and shows the value of its last expression.

    Returns:
        The exit status: 1 after an exception, whose traceback is printed.
    """
    linecache.cache["snippet.py"] = (len(source), None, source.splitlines(True), "snippet.py")
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        tree = ast.parse(source, "snippet.py")
        last: list[ast.stmt] = []
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last.append(tree.body.pop())
        exec(compile(tree, "snippet.py", "exec"), names)
        # As at Python's prompt, its value is shown.
        exec(compile(ast.Interactive(last), "snippet.py", "single"), names)
    except SystemExit as end:
        return exit_status(end)
    except BaseException as error:
        # Without this function's line: where it runs is no business of the model's.
        frames = error.__traceback__
        if frames is not None:
            frames = frames.tb_next
        traceback.print_exception(error.with_traceback(frames), limit=-5, chain=False)
        return 1
    return 0


def exit_status(end: SystemExit) -> int:
    """Returns the status with which Python would end."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code
    return 1


def main() -> None:
    """Runs the snippet in snippet.py.

    Arguments: the caller's process, CPU seconds, bytes of memory, of a written file and of all of
    them.
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
