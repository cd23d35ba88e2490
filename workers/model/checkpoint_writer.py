"""The thread that writes a worker's checkpoints while training goes on.

Weights and optimiser state change only in an update, and an update waits for the copy; so what is
written is the state at `start`, and neither the copy nor the disk holds up the rest:

    main thread   start ........ generate, log-probs ........ wait_until_copied, update ...
    this thread         copy the tensors to CPU memory | write and force to disk

Invariant: one checkpoint is written at a time, and an error in the thread is raised where the
checkpoint is waited for.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from threading import Event

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from workers.ranks.process_groups import world_size

# How tensors are copied to CPU memory: by plain copies, in the thread that asks for them.
STAGING = StagingOptions(
    use_pinned_memory=False,
    use_shared_memory=False,
    use_async_staging=False,
    use_non_blocking_copy=False,
)


class CheckpointWriter:
    """Writes one worker's checkpoints, on every rank.

    It is made after the process group, since the threads of all ranks have a group of their own. A
    single rank has none, whatever group an engine may have made in its process.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if world_size() > 1 else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._copied = Event()
        self._copied.set()
        self._written: Future[None] | None = None

    def start(
        self,
        tensors_by_folder: Mapping[Path, dict[str, Tensor]],
        write_others: Sequence[Callable[[], object]],
    ) -> None:
        """Begins to write tensors into each folder, and then calls each of `write_others`.

        Every rank calls it with its own shards. The one before must have been waited for with
        `is_written`.
        """
        # The thread must not copy what is still being computed.
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._copied.clear()
        self._written = self._thread.submit(self._write, tensors_by_folder, write_others)

    def wait_until_copied(self) -> None:
        """Returns when the tensors may change again."""
        self._copied.wait()

    def is_written(self, wait: bool) -> bool:
        """Checks whether all of the last `start` is on disk; with `wait`, returns once it is.

        Raises:
            OSError: it could not be written, on whichever rank; says why.
        """
        if self._written is None:
            return True
        if not wait and not self._written.done():
            return False
        # Where Ctrl-C interrupts this, it is asked again.
        wait_for([self._written])
        written = self._written
        self._written = None
        try:
            written.result()
        except MemoryError:
            raise
        # torch's own writer raises RuntimeError, a tokenizer's whatever it likes.
        except (CheckpointException, Exception) as error:
            raise OSError(f"the checkpoint could not be written: {_causes(error)}") from None
        return True

    def _write(
        self,
        tensors_by_folder: Mapping[Path, dict[str, Tensor]],
        write_others: Sequence[Callable[[], object]],
    ) -> None:
        copies = {}
        try:
            for folder, tensors in tensors_by_folder.items():
                # Sharded as the tensors are.
                copies[folder] = DefaultStager(STAGING).stage(tensors)
        finally:
            self._copied.set()
        for folder, copy in copies.items():
            dcp.save(
                copy,
                checkpoint_id=folder,
                process_group=self._group,
                no_dist=self._group is None,
            )
        for write in write_others:
            write()


def _causes(error: BaseException) -> str:
    """Describes an error; one of several ranks by each rank's own."""
    if not isinstance(error, CheckpointException):
        cause = _first_cause(error)
        is_plain = isinstance(cause, OSError | RuntimeError)
        return str(cause) if is_plain else f"{type(cause).__name__}: {cause}"
    failures = sorted(error.failures.items())
    return "; ".join(f"rank {rank}: {_first_cause(failure[0])}" for rank, failure in failures)


def _first_cause(error: BaseException) -> BaseException:
    """Returns the system's own error behind one of torch's, such as a full disk; else the error.

    Whatever writes the end of a broken file fails in turn, with words of its own.
    """
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.errno is not None:
            return behind
        behind = behind.__cause__ or behind.__context__
    return error
