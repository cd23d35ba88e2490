"""How a process takes memory and gives it back: CUDA's allocator, oneDNN's caches, the C heap.

These settings keep the memory of a long run flat; none of them changes a number.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Entries of each of oneDNN's caches.
ONEDNN_CACHE_ENTRIES = "64"
# Options of glibc's mallopt, from malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
# Blocks from this size on are mapped by themselves.
MMAP_FROM_BYTES = 32 << 20
# The heap keeps freed memory up to this size: as much as the option can say.
KEEP_HEAP_BYTES = 2047 << 20


@contextmanager
def expandable_segments(device: torch.device) -> Iterator[None]:
    """Lets PyTorch's CUDA memory grow in place in the block.

    Batches of ever-changing sizes so leave no gaps. Not outside the block, since vLLM's pools,
    which sleep, cannot have that.
    """
    if device.type != "cuda":
        yield
        return
    # PyTorch forgets the settings that are not named again.
    kept = [
        setting
        for setting in _allocator_settings().split(",")
        if setting and not setting.startswith("expandable_segments")
    ]
    _set_allocator_settings(",".join([*kept, "expandable_segments:True"]))
    try:
        yield
    finally:
        _set_allocator_settings(",".join([*kept, "expandable_segments:False"]))


def _allocator_settings() -> str:
    """Returns the settings of PyTorch's allocator; torch 2.11 tells those of its start alone."""
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        return torch._C._accelerator_getAllocatorSettings()
    named = os.environ.get("PYTORCH_ALLOC_CONF")
    return named if named is not None else os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def _set_allocator_settings(settings: str) -> None:
    """Sets them, by the name that this version of torch has."""
    if hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        torch._C._accelerator_setAllocatorSettings(settings)
    else:
        torch.cuda.memory._set_allocator_settings(settings)


def limit_caches() -> None:
    """Bounds oneDNN's caches, unless the environment says otherwise.

    Call it before the first matrix product.

    Every new shape of a matrix product caches about 300 KB. Batches have new shapes all the time,
    so by default memory grows by 50 MB a step up to 1,024 entries, of which none is used again.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", ONEDNN_CACHE_ENTRIES)
    os.environ.setdefault("LRU_CACHE_CAPACITY", ONEDNN_CACHE_ENTRIES)


def keep_heap() -> None:
    """Makes glibc return large blocks to the system when they are freed, and keep the rest at hand.

    Below 32 MiB activations are taken from the heap again, step by step. If their freed top went
    back, every page of it would be faulted in anew in each update. Does nothing where the C library
    has no `mallopt`.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_FROM_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, KEEP_HEAP_BYTES)
