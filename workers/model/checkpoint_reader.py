"""Reading of torch.distributed.checkpoint (DCP) folders that hold tensors and nothing else.

Invariant: reading a checkpoint runs no code of its. DCP's metadata is a pickle, and its entries
that are no tensors are pickles too: the first is read with an allow-list, the others must not be
there.
"""

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from training.config.plain_files import open_plain

# The names that DCP's metadata may have, by module.
ALLOWED_NAMES: dict[str, tuple[str, ...]] = {
    "pathlib": ("PosixPath",),
    "torch": ("Size", "float32", "float16", "bfloat16", "int64", "uint8"),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
}


class SafeReader(dcp.FileSystemReader):
    """Reads a folder's tensors; refuses what could run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads what the folder holds.

        Raises:
            pickle.UnpicklingError: it names something other than tensors.
        """
        with open(open_plain(Path(self.path) / ".metadata"), "rb") as file:
            metadata = _AllowListUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(
                f"{self.path}: .metadata holds a {type(metadata).__name__}"
            )
        others = [
            name
            for name, entry in metadata.state_dict_metadata.items()
            if not isinstance(entry, TensorStorageMetadata)
        ]
        if others:
            raise pickle.UnpicklingError(
                f"{self.path}: {others} are no tensors; ours hold nothing else"
            )
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _AllowListUnpickler(pickle.Unpickler):
    """Builds the classes of DCP's metadata and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """Finds an allowed class, and raises UnpicklingError for others."""
        if name not in ALLOWED_NAMES.get(module, ()):
            raise pickle.UnpicklingError(
                f"a checkpoint's metadata names {module}.{name}, which it has no reason to"
            )
        return super().find_class(module, name)


def read_portions(
    folder: str | Path,
    saved: Mapping[str, TensorStorageMetadata],
    names: Sequence[str],
    portion_bytes: int,
) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors of a folder in the order of `names`; one process reads them all.

    Args:
        saved: what the folder holds.
        names: of which one may come several times.
        portion_bytes: about what is in memory at a time, a larger tensor alone.
    """
    for portion in _portions(saved, names, portion_bytes):
        tensors = {
            name: torch.empty(saved[name].size, dtype=saved[name].properties.dtype)
            for name in portion
        }
        dcp.load(tensors, storage_reader=SafeReader(folder), no_dist=True)
        for name in portion:
            yield name, tensors[name]


def _portions(
    saved: Mapping[str, TensorStorageMetadata], names: Sequence[str], portion_bytes: int
) -> Iterator[Sequence[str]]:
    """Cuts the names into portions that are read at once."""
    portion: list[str] = []
    size = 0
    for name in names:
        entry = saved[name]
        length = math.prod(entry.size) * entry.properties.dtype.itemsize
        if portion and size + length > portion_bytes:
            yield portion
            portion = []
            size = 0
        portion.append(name)
        size += length
    if portion:
        yield portion
