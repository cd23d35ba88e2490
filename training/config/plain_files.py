"""Reads small files of folders that a stranger may have made: regular ones, of a bounded size.

Invariant: no device, FIFO or endless file is read, and no YAML whose aliases unfold to more than
its text could hold is built.
"""

import os
import stat
from pathlib import Path
from typing import Any

import yaml

# Bytes of a file of settings, and of a checkpoint's manifest.
MAX_BYTES = 4 << 20
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
    """Returns a file below a folder that is no regular one, such as a FIFO; None: there is none.

    Links to folders are not followed.
    """
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            try:
                mode = path.stat().st_mode
            except OSError:
                # A link to nothing; whoever reads it says so.
                continue
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                return path
    return None
