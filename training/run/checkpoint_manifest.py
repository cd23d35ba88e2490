"""The manifest of a checkpoint: which files it has, by size and checksum.

Invariant: a folder that has one was written to its end; `damage` says what has changed since.
"""

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.config.plain_files import open_plain, read_plain_text
from training.run.checkpoint_contents import DRIVER_STATE, MANIFEST
from training.run.files import force_to_disk, write_atomically

# Bytes of a file that are read at once for its checksum.
BLOCK = 1 << 22


def write_manifest(folder: Path) -> None:
    """Lists the folder's files, and forces all of it to disk; the list comes last."""
    files = {
        str(path.relative_to(folder)): _fingerprint(path)
        for path in folder.rglob("*")
        if path.is_file()
    }
    force_to_disk(folder)
    write_atomically(folder / MANIFEST, json.dumps(files))


def take_from_manifest(checkpoint: Path, part: str) -> None:
    """Takes a folder's files off the list, before they are removed; not off one that is damaged."""
    try:
        files = json.loads(read_plain_text(checkpoint / MANIFEST))
        kept = {name: written for name, written in files.items() if name.split("/")[0] != part}
    except (FileNotFoundError, ValueError, AttributeError, RecursionError):
        return
    write_atomically(checkpoint / MANIFEST, json.dumps(kept))


def damage(folder: Path, needs: Sequence[str] = (), *, read: Sequence[str] = ("",)) -> str | None:
    """Returns what is wrong with a checkpoint's files, None where nothing is.

    Args:
        needs: the workers' folders of which the manifest must list files.
        read: what the names of the files begin with that are looked at; by default all are.
    """
    try:
        files = json.loads(read_plain_text(folder / MANIFEST))
        changed = [
            name
            for name, written in files.items()
            if name.startswith(tuple(read)) and _has_changed(folder, name, written)
        ]
    # The manifest, or a file of it, is gone, or it is no table of files.
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        return str(error)
    # The driver's state is a file of no folder, and stands for itself.
    listed = {name.split("/")[0] for name in files}
    missing = [name for name in (DRIVER_STATE, *needs) if name not in listed]
    if missing:
        return f"{MANIFEST} lists no {', '.join(missing)}"
    if changed:
        return f"{changed[0]} has changed since it was written"
    return None


def parts_left_out(folder: Path, needs: Sequence[str]) -> list[str]:
    """Lists which of the workers' folders a checkpoint was saved, or pruned, without.

    None of them where the manifest cannot be read: `damage` says so.
    """
    try:
        files = json.loads(read_plain_text(folder / MANIFEST))
        listed = {name.split("/")[0] for name in files}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return []
    return [name for name in needs if name not in listed and not (folder / name).exists()]


def _has_changed(folder: Path, name: str, written: Any) -> bool:
    """Compares a file with its entry in the manifest.

    Raises:
        ValueError: the manifest names a file outside of its folder.
        OSError: there is no such file, or no regular one.
    """
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{MANIFEST} names {name}, which is outside of the folder")
    path = folder / name
    # Without reading it: an endless file has no right size.
    size = path.stat().st_size
    if not isinstance(written, list) or written[:1] != [size]:
        os.close(open_plain(path))
        return True
    return _fingerprint(path) != written


def _fingerprint(path: Path) -> list[int]:
    """Returns [bytes, CRC-32]: enough against accidents.

    Reading a checkpoint runs no code, so none need be trusted.
    """
    checksum = 0
    with open(open_plain(path), "rb") as file:
        while block := file.read(BLOCK):
            checksum = zlib.crc32(block, checksum)
    return [path.stat().st_size, checksum]
