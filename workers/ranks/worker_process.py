"""Prepares a worker's process before it builds models, and keeps it deterministic.

A run that asks for it (`trainer.deterministic`) is repeated bitwise on the same machine.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers

from workers.ranks.process_groups import start_process_group


def start_worker(device: torch.device, *, deterministic: bool) -> None:
    """Joins the other ranks, and keeps the process to deterministic operations if asked."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # A single rank saves by itself.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    if deterministic:
        # Read at the process's first matrix product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    start_process_group(device)


@contextmanager
def strictly_deterministic(deterministic: bool) -> Iterator[None]:
    """Makes the block of a `deterministic` run deterministic too, or has it raise.

    On CUDA the backward pass of attention takes its deterministic kernels only then (with
    `warn_only` it warns and takes the others), while sampling has operations for which there are
    none.
    """
    if not deterministic:
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)
