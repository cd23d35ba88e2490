"""Runs a Python snippet within limits: the child's side of PythonTool, started as `python -I -S python_snippet.py …`.

Invariant: every wall that the machine allows stands before the snippet is executed. From the outside in:

    namespaces   no network, no other processes, and a root of its own: read-only, with nothing but the interpreter's
                 files in it and a folder of limited size                      (Linux with user namespaces, or root)
    Landlock     only the interpreter's files are read, only the working folder is written     (Linux 5.13 and newer)
    seccomp      no sockets, no new processes, no signals to others, no modes       (Linux on x86-64 and ARM, 64 bit)
    audit hook   says in words what is not allowed; the only wall elsewhere, and code that sets out to break the
                 interpreter gets around it

Where namespaces are forbidden (Docker's default), the total size of the folder is not limited, names, sizes and times
of files are seen and times can be changed. `custom/tools/walls.py` finds out which walls stand. A hole in the kernel
is a hole in all of them: for code of people who attack use a virtual machine.
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
import traceback
from typing import Any

CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_THREAD = 0x20000, 0x4000000, 0x8000000, 0x10000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE, MNT_DETACH = 1 << 14, 1 << 18, 2
# linux/landlock.h: execute, read a file and read a folder; all that a file (not a folder) can have.
READ, FILE = 0b1101, 0b1100_0000_0000_0111
# What the interpreter reads, besides its own folders.
SHOWN = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/nix/store", "/etc/ld.so.cache"),
    *("/etc/localtime", "/usr/share/zoneinfo", "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"),
)
# The calls that seccomp refuses or looks at, with their numbers on x86-64 and on ARM (64 bit). Mounts need rights that
# are gone and come back with a new user namespace only.
CALLS = (
    "socket 41 198, execve 59 221, execveat 322 281, fork 57 -, vfork 58 -, unshare 272 97, setns 308 268, "
    "setsid 112 157, setpgid 109 154, ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, "
    "pidfd_getfd 438 438, tkill 200 130, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, "
    "pidfd_send_signal 424 424, shmget 29 194, shmat 30 196, mq_open 240 180, add_key 248 217, request_key 249 218, "
    "keyctl 250 219, io_uring_setup 425 425, clone 56 220, clone3 435 435, kill 62 129, tgkill 234 131, "
    "prlimit64 302 261, fcntl 72 25, truncate 76 45, chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, "
    "chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54"
)
# By machine and bytes of a pointer: the column of CALLS, and AUDIT_ARCH of linux/audit.h.
MACHINES = {("x86_64", 8): (1, 0xC000003E), ("aarch64", 8): (2, 0xC00000B7)}
DENIED = (
    *("socket.", "ctypes.", "subprocess.", "pty.", "resource.setrlimit", "signal.pthread_kill", "shutil."),
    *("os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill"),
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate"),
    *("os.setxattr", "os.removexattr", "os.utime", "sys.addaudithook"),
)


def call(name: str, *arguments: Any) -> int:
    """Calls a function of the C library; OSError where it fails."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    result = function(*(ctypes.c_long(value) if isinstance(value, int) else value for value in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
    return result


def mount(source: str, target: str | bytes, flags: int, kind: str = "", options: str = "") -> None:
    call("mount", os.fsencode(source), os.fsencode(target), kind.encode(), flags, options.encode())


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


def enter_namespaces() -> bool:
    """Moves to new namespaces, in which there is no network and which take every child along when they end.

    It returns whether that worked: a machine may forbid it. The next process forked is the first of its namespace.
    """
    others = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET | CLONE_NEWPID
    uid, gid = os.getuid(), os.getgid()
    with contextlib.suppress(OSError):
        call("unshare", CLONE_NEWUSER | others)
        # Where AppArmor takes a new user namespace its rights, this fails, and the other namespaces remain.
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        return True
    with contextlib.suppress(OSError):
        return call("unshare", others) == 0
    return False


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends; where that has happened already it ends here."""
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
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


def interpreter_paths() -> list[str]:
    """The files and folders that the interpreter reads; none lies in another."""
    wanted = (*sys.path, f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64", *SHOWN)
    found = {name(path) for path in wanted for name in (os.path.normpath, os.path.realpath) if os.path.exists(path)}
    return [path for path in sorted(found) if not any(path.startswith(f"{other}/") for other in found)]


def change_root(root: str, disk_bytes: int) -> None:
    """Moves to a root of its own: the interpreter's files, read-only, and a /tmp in memory of `disk_bytes`.

    Args:
        root: an empty folder, over which it is mounted; in the namespace of this process only.
    """
    mount("none", "/", MS_REC | MS_PRIVATE)
    mount("tmpfs", root, MS_NOSUID | MS_NODEV, "tmpfs", "size=1m,nr_inodes=1000,mode=755")
    for path in interpreter_paths():
        os.makedirs(root + (path if os.path.isdir(path) else os.path.dirname(path)), exist_ok=True)
        if not os.path.isdir(path):
            open(root + path, "x").close()
        mount(path, root + path, MS_BIND | MS_REC)
    os.mkdir(f"{root}/tmp")
    with open("/proc/self/mountinfo", "rb") as file:
        # A space in a path is written as \040.
        points = [line.split()[4].decode("unicode_escape").encode("latin-1") for line in file]
    for point in points:
        if point.startswith(os.fsencode(root)):
            locked = os.statvfs(point).f_flag & (MS_NODEV | MS_NOEXEC)
            mount("none", point, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | locked)
    options = f"size={disk_bytes},nr_inodes=4096,mode=700"
    mount("tmpfs", f"{root}/tmp", MS_NOSUID | MS_NODEV | MS_NOEXEC, "tmpfs", options)
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)
    os.mkdir("/tmp/snippet")
    os.chdir("/tmp/snippet")


def drop_capabilities() -> None:
    """Gives up every right of root in this namespace, also for programs that it starts."""
    with contextlib.suppress(OSError):
        for capability in range(64):
            call("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # Version 3 of linux/capability.h, for this process; and three empty sets.
    call("capset", struct.pack("=Ii", 0x20080522, 0), bytes(24))


def restrict_files(readable: list[str], writable: list[str]) -> None:
    """Has Landlock deny every other file to this process; OSError where the kernel has no Landlock."""
    version = call("syscall", 444, None, 0, 1)
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    # Files; from version 4 on TCP too, from 6 on abstract sockets and signals.
    handled = struct.pack("QQQ", rights, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = call("syscall", 444, handled, len(handled), 0)
    for path, allowed in (*((path, READ) for path in readable), *((path, rights) for path in writable)):
        descriptor = os.open(path, os.O_PATH)
        allowed &= rights if os.path.isdir(path) else rights & FILE
        call("syscall", 445, ruleset, 1, struct.pack("=Qi", allowed, descriptor), 0)
        os.close(descriptor)
    call("syscall", 446, ruleset, 0)
    os.close(ruleset)


def refuse_calls() -> None:
    """Has seccomp refuse CALLS, but for threads and for what a process does to itself."""
    column, architecture = MACHINES[os.uname().machine, struct.calcsize("P")]
    entries = [entry.split() for entry in CALLS.split(", ")]
    numbers = {entry[0]: int(entry[column]) for entry in entries if entry[column] != "-"}
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = (answer, 0, 0, 0x7FFF0000), (answer, 0, 0, 0x50001), (answer, 0, 0, 0x50026)
    # Each is (code, steps to jump if it holds, steps if not, value); a call's architecture is at 4, its number at 0.
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), refuse, (load, 0, 0, 0), (at_least, 0, 1, 1 << 30), refuse]
    # Without clone3, whose flags lie in memory, the C library takes clone.
    program += [(equal, 0, 1, numbers.pop("clone3")), unknown]
    # The first argument, at 16, is the flags of clone, and the process of the others.
    tests = (("clone", any_bit, CLONE_THREAD), ("prlimit64", equal, 0))
    for name, test, value in (*tests, ("kill", equal, os.getpid()), ("tgkill", equal, os.getpid())):
        program += [(equal, 0, 4, numbers.pop(name)), (load, 0, 0, 16), (test, 0, 1, value), allow, refuse]
    # The second, at 24, is the command of fcntl: F_SETOWN and F_SETOWN_EX have the kernel signal another process.
    program += [
        (equal, 0, 5, numbers.pop("fcntl")),
        (load, 0, 0, 24),
        (equal, 2, 0, 8),
        (equal, 1, 0, 15),
        allow,
        refuse,
    ]
    for number in numbers.values():
        program += [(equal, 0, 1, number), refuse]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in (*program, allow)))
    call("prctl", PR_SET_SECCOMP, 2, struct.pack("HP", len(program) + 1, ctypes.addressof(code)), 0, 0)


def raise_walls(caller: int, disk_bytes: int) -> None:
    """Has the kernel confine this process as far as it can; where it has a root of its own, in another folder."""
    folder, readable = os.getcwd(), interpreter_paths()
    die_with_parent(caller)
    if enter_namespaces():
        continue_in_child()
        try:
            change_root(folder, disk_bytes)
            readable = ["/"]
        except OSError:
            # The namespaces stay, half a root does not.
            with contextlib.suppress(OSError):
                call("umount2", os.fsencode(folder), MNT_DETACH)
            os.chdir(folder)
    drop_capabilities()
    with contextlib.suppress(OSError):
        restrict_files(readable, [os.getcwd(), "/dev/null"])
    with contextlib.suppress(OSError, KeyError):
        refuse_calls()


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
    """Runs the snippet.

    Arguments: the caller's process, CPU seconds, bytes of memory, of a written file and of all of them, and whether the
    audit hook is set.
    """
    caller, cpu_s, memory_bytes, file_bytes, disk_bytes, guarded = map(int, sys.argv[1:7])
    with open("snippet.py", encoding="utf-8") as file:
        source = file.read()
    if sys.platform == "linux":
        raise_walls(caller, disk_bytes)
    limit_process(cpu_s, memory_bytes, file_bytes)
    sys.argv = ["snippet.py"]
    os.environ["HOME"] = os.getcwd()
    if guarded:
        guard(os.getcwd())
    status = execute(source)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that the snippet left do not hold it up.
    os._exit(status)


if __name__ == "__main__":
    main()
