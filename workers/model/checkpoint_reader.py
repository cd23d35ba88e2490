"""Reading of torch.distributed.checkpoint (DCP) folders that hold tensors and nothing else.

Invariant: reading a checkpoint runs no code of its. DCP's metadata is a pickle, and its entries
that are no tensors are pickles too: the first is read with an allow-list, the others must not be
there.
"""

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from data.plain_pickles import NotPlain
from training.config.plain_files import open_plain

# Of tensors of every kind: a model's buffers and an optimiser's state may be of any.
DTYPES = tuple(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))
# The names that DCP's metadata may have, by module.
ALLOWED_NAMES: dict[str, tuple[str, ...]] = {
    "pathlib": ("PosixPath",),
    "torch": ("Size", *DTYPES),
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


class DoesNotFit(FileNotFoundError, ValueError):
    """Reports a part of a checkpoint that this model or optimiser cannot go on from."""


class SafeReader(dcp.FileSystemReader):
    """Reads a folder's tensors; refuses what could run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads what the folder holds.

        Raises:
            NotPlain: it names something other than tensors, or files outside of the folder.
        """
        with open(open_plain(Path(self.path) / ".metadata"), "rb") as file:
            metadata = _unpickled(file, f"{self.path}/.metadata")
        if not isinstance(metadata, Metadata):
            raise NotPlain(f"{self.path}: .metadata holds a {type(metadata).__name__}")
        others = [
            name
            for name, entry in metadata.state_dict_metadata.items()
            if not isinstance(entry, TensorStorageMetadata)
        ]
        if others:
            raise NotPlain(f"{self.path}: {others} are no tensors; ours hold nothing else")
        self._require_own_files(metadata)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _require_own_files(self, metadata: Metadata) -> None:
        """Raises NotPlain where a tensor is said to lie elsewhere, or in no regular file."""
        for name in {str(place.relative_path) for place in metadata.storage_data.values()}:
            path = Path(self.path) / name
            if Path(name).name != name or (path.exists() and not path.is_file()):
                raise NotPlain(f"{self.path}: .metadata names {name}, which is no file of it")


def _unpickled(file: IO[bytes], name: str) -> Any:
    """Reads a pickle of DCP's metadata. Raises NotPlain where it is none, or names more."""
    try:
        return _AllowListUnpickler(file).load()
    except NotPlain:
        raise
    # A damaged pickle raises what it likes.
    except Exception as error:
        raise NotPlain(f"{name} is no list of tensors: {type(error).__name__}: {error}") from error


class _AllowListUnpickler(pickle.Unpickler):
    """Builds the classes of DCP's metadata and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """Finds an allowed class, and raises UnpicklingError for others."""
        if name not in ALLOWED_NAMES.get(module, ()):
            raise NotPlain(
                f"a checkpoint's metadata names {module}.{name}, which it has no reason to"
            )
        return super().find_class(module, name)


def load_tensors(tensors: dict[str, Tensor], reader: SafeReader, *, no_dist: bool) -> None:
    """Reads a folder's tensors into these, in place.

    Raises:
        NotPlain: a file holds something else than tensors.
        CheckpointException: it cannot be read, on whichever rank.
    """
    try:
        dcp.load(tensors, storage_reader=reader, no_dist=no_dist)
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, pickle.UnpicklingError):
                raise NotPlain(
                    f"{reader.path} is not read: a file of it holds more than tensors, which could "
                    "run code"
                ) from error
        raise


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
        load_tensors(tensors, SafeReader(folder), no_dist=True)
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
