"""What keeps the memory of a CPU run flat: settings of glibc and oneDNN, made before the first tensor.

Invariant: without glibc nothing happens.
"""

from __future__ import annotations

import ctypes
import os

# From malloc.h.
M_MMAP_THRESHOLD = -3


def limit_caches() -> None:
    """Bounds oneDNN's caches, unless the environment says otherwise; to be called before the first matrix product.

    Every new shape of a matrix product caches about 300 KB. Batches have new shapes all the time, so by default memory
    grows by 50 MB a step up to 1,024 entries, of which none is used again.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")


def return_large_blocks() -> None:
    """Has glibc map blocks from 2 MiB on by themselves, so that they go back when freed.

    A heap of activations of ever-changing sizes falls to pieces otherwise, and grows by a tenth.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_THRESHOLD, 2 << 20)


def return_free_heap() -> None:
    """Hands freed memory back to the system: what generation leaves is too scattered for the update to use again."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
