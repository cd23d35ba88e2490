"""Reads files of folders that a stranger may have made: regular ones, of a bounded size or line.

Invariant: no device, FIFO or endless file is read, and no YAML whose aliases unfold to more than
its text could hold is built.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

# Bytes of a file of settings, and of a checkpoint's manifest.
MAX_BYTES = 4 << 20
# Bytes of a line, as of an episode; a file of holes is one line without an end.
LONGEST_LINE = 256 << 20
# Bytes of a file that describes a model, such as a tokenizer, and what its name ends with.
MAX_SETTINGS_BYTES = 512 << 20
SETTINGS_FILES = (".json", ".jinja", ".model", "merges.txt", "vocab.txt")
# Files that links of a folder may lead to outside of it.
MAX_ELSEWHERE = 20_000
# Nodes of a YAML document with its aliases unfolded, and how deep they may be nested.
MAX_NODES = 200_000
MAX_DEPTH = 100
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def open_plain(path: Path) -> int:
    """Opens a regular file to be read, and returns its descriptor.

    Raises:
        OSError: there is none; it is a device, a FIFO, a socket or a folder.
    """
    # A FIFO that nobody writes would hold up who opens it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(f"{path} is no regular file")


def read_plain_text(path: Path, *, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Reads a small regular file. Raises OSError where it is none, or larger than MAX_BYTES."""
    with open(open_plain(path), "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(f"{path} is larger than {MAX_BYTES >> 20} MiB")
    return content.decode(encoding, errors)


def plain_lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a regular file, each with its end.

    Raises:
        OSError: there is none; it is no regular file, or a line of it is longer than LONGEST_LINE.
    """
    with open(open_plain(path), "rb") as file:
        while line := file.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                raise OSError(f"{path} has a line of more than {LONGEST_LINE >> 20} MiB")
            yield line


def load_plain_yaml(text: str) -> Any:
    """Reads YAML as `yaml.safe_load` does. Raises YAMLError, also where aliases unfold too far."""
    require_small_yaml(text)
    return yaml.safe_load(text)


def require_small_yaml(text: str) -> None:
    """Raises YAMLError where a document is nested too deep, or its aliases unfold too far."""
    sizes: dict[str, int] = {}
    # The anchor and the nodes so far of each collection that is open.
    open_nodes: list[list[Any]] = [["", 0]]
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.AliasEvent):
            open_nodes[-1][1] += sizes.get(str(event.anchor), 1)
        elif isinstance(event, yaml.ScalarEvent):
            open_nodes[-1][1] += 1
            if event.anchor:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append([event.anchor, 1])
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_nodes.pop()
            open_nodes[-1][1] += size
            if anchor:
                sizes[anchor] = size
        if len(open_nodes) > MAX_DEPTH:
            raise yaml.YAMLError(f"it is nested deeper than {MAX_DEPTH} levels")
        if open_nodes[-1][1] > MAX_NODES:
            raise yaml.YAMLError(f"with its aliases it holds more than {MAX_NODES} values")


def special_file(folder: Path) -> Path | None:
    """Returns a file below a folder that nobody saves there: a FIFO, a device, an endless table.

    Links to folders are followed, each folder once; one that leads to more than MAX_ELSEWHERE
    files elsewhere is such a file, too. Returns None where there is none.
    """
    root = folder.resolve()
    seen: set[Path] = set()
    elsewhere = 0
    for place, folders, names in os.walk(folder, followlinks=True):
        real = Path(place).resolve()
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        if not real.is_relative_to(root):
            elsewhere += len(names) + len(folders)
        if elsewhere > MAX_ELSEWHERE:
            return Path(place)
        for name in names:
            path = Path(place, name)
            try:
                status = path.stat()
            except OSError:
                # A link to nothing; whoever reads it says so.
                continue
            is_large = status.st_size > MAX_SETTINGS_BYTES and name.endswith(SETTINGS_FILES)
            if not stat.S_ISREG(status.st_mode) or is_large:
                return path
    return None
