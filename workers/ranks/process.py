"""A rank's process: what it does once before it builds models, and where it keeps to deterministic operations.

Invariant: a run that asks for it (`trainer.deterministic`) is repeated bitwise on the same machine.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import transformers

from workers.ranks.distributed import start_process_group


def start_worker(device: torch.device, *, deterministic: bool) -> None:
    """Readies the process: joins the other ranks, and keeps to deterministic operations if asked."""
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

    On CUDA the backward pass of attention takes its deterministic kernels only then (with `warn_only` it warns and
    takes the others), while sampling has operations for which there are none.
    """
    with ExitStack() as stack:
        if deterministic:
            torch.use_deterministic_algorithms(True)
            stack.callback(torch.use_deterministic_algorithms, True, warn_only=True)
        yield


@contextmanager
def expandable_segments(device: torch.device) -> Iterator[None]:
    """Has PyTorch's CUDA memory grow in place in the block, so that batches of ever-changing sizes leave no gaps.

    Not outside, since vLLM's pools, which sleep, cannot have that.
    """
    with ExitStack() as stack:
        if device.type == "cuda":
            # PyTorch forgets the settings that are not named again.
            settings = torch._C._accelerator_getAllocatorSettings().split(",")
            others = "".join(f"{s}," for s in settings if s and not s.startswith("expandable_segments"))
            torch._C._accelerator_setAllocatorSettings(f"{others}expandable_segments:True")
            stack.callback(torch._C._accelerator_setAllocatorSettings, f"{others}expandable_segments:False")
        yield
