"""What keeps the memory of a CPU run flat: settings of glibc and oneDNN, made before the first tensor.

Invariant: without glibc nothing happens.
"""

import ctypes
import os

# From malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def limit_caches() -> None:
    """Bounds oneDNN's caches, unless the environment says otherwise; to be called before the first matrix product.

    Every new shape of a matrix product caches about 300 KB. Batches have new shapes all the time, so by default memory
    grows by 50 MB a step up to 1,024 entries, of which none is used again.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")


def settle_heap() -> None:
    """Has glibc map blocks from 32 MiB on by themselves, so that they go back when freed, and keep the rest at hand.

    Below that size activations are taken from the heap again, step by step: if their freed top went back, every page
    of it would be faulted in anew in each update.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 2047 << 20)
