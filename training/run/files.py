"""Writes files so that a kill or a crash leaves the old file or the new one, never a part."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes a file under a temporary name, forces it to disk, and renames it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    force_to_disk(temporary)
    temporary.replace(path)


def force_to_disk(written: Path) -> None:
    """Calls fsync on a file, or a folder and all below it, so that a rename cannot overtake it."""
    for path in [written, *written.rglob("*")]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
