"""Tells whether memory ran out: by what an error says, and by the system's count of its kills.

A process that the system kills for want of memory says nothing, and neither does its end: it is
killed as by anyone. The system counts such kills, of this machine and of the group of processes
that limits it, such as a container.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# How the allocators of torch (CUDA, CPU), vLLM, C++ and the system, and Ray's watch over a node's
# memory say that memory ran out.
MEMORY_RAN_OUT = (
    "OutOfMemoryError",
    "MemoryError:",
    "out of memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "No available memory",
    "std::bad_alloc",
    "running low on memory",
    # As a line of ours says it.
    "Memory ran out:",
)
# Ray's errors of a process that has ended without a word.
DEATHS = ("ActorDiedError", "ActorUnavailableError", "RayActorError", "WorkerCrashedError")
COUNTED = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
CGROUPS = Path("/sys/fs/cgroup")


class MemoryKills:
    """Notes the system's kills for want of memory so far; `any_since` tells of later ones."""

    def __init__(self) -> None:
        self._before = _kills()

    def any_since(self) -> bool:
        """Checks whether the system has killed a process for want of memory since."""
        now = _kills()
        return any(count > self._before.get(file, count) for file, count in now.items())

    def explain(self, error: BaseException) -> str:
        """Returns what an error lacks that is of a process killed for memory; "" for others."""
        if type(error).__name__ in DEATHS and self.any_since():
            return "the system killed a process, out of memory"
        return ""


def ran_out_of_memory(text: str) -> bool:
    """Checks whether an error's text is an allocator's."""
    return any(words in text for words in MEMORY_RAN_OUT)


def _kills() -> dict[Path, int]:
    """Reads the counts that there are, by file."""
    counts = {}
    for file in (Path("/proc/vmstat"), *_files_of_own_group()):
        with suppress(OSError):
            found = COUNTED.search(file.read_text())
            if found is not None:
                counts[file] = int(found[1])
    return counts


def _files_of_own_group() -> Iterator[Path]:
    """Yields where this process's group counts its kills, in both versions of cgroups."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield CGROUPS / group.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            yield CGROUPS / "memory" / group.lstrip("/") / "memory.oom_control"
