"""How a call reaches the ranks of a worker group: `register` marks methods, a group offers them.

Invariant: every kind of group offers the same methods, hands over the same fields of a batch, and
gives the same results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeAlias, TypeVar

from data.protocol import DataProto, pad_dataproto_to_divisor

Method = TypeVar("Method", bound=Callable[..., Any])
# The attribute in which `register` leaves itself on a method.
REGISTERED = "_registered"

# A class with its constructor's arguments, to be built where it will run.
ClassWithInitArgs: TypeAlias = partial[Any]
RayClassWithInitArgs = ClassWithInitArgs
# The workers that share each process of a pool, by role.
Colocated = Mapping[str, ClassWithInitArgs]


def create_colocated_worker_cls(class_dict: Colocated) -> Colocated:
    """Takes the workers of several roles, by role, that are to share each process of a pool."""
    return dict(class_dict)


class Dispatch(Enum):
    """Lists how a call can reach the ranks of a group, and what comes back.

    RANK_ZERO: the first rank alone.
    ONE_TO_ALL: every rank with the same arguments; the first rank's answer.
    ALL_TO_ALL: argument lists with one entry a rank; the list of answers.
    DP_COMPUTE_PROTO: the DataProto is cut into equal chunks, padded with dummy rows where it does
        not divide; answers that are DataProtos are joined, of others (metrics, which the ranks have
        summed up) the first rank's is returned.
    """

    RANK_ZERO = "rank_zero"
    ONE_TO_ALL = "one_to_all"
    ALL_TO_ALL = "all_to_all"
    DP_COMPUTE_PROTO = "dp_compute_proto"


@dataclass(frozen=True)
class register:
    """Marks a worker's method as callable through its group, and describes how it is called.

    Args:
        reads: of the batch's fields, only these and `uid` are sent (those of them that it has);
            none named: all.
        further_reads: a registered method of the worker that returns more of them.
        ranks_per_chunk: a registered method of the worker that returns how many consecutive ranks
            share one chunk (tensor or sequence parallelism).
        keeps_rows: an answer has a row for each row of the chunk; otherwise any number, and no row
            is added to the chunks.
    """

    dispatch_mode: Dispatch = Dispatch.ALL_TO_ALL
    _: KW_ONLY
    reads: tuple[str, ...] = ()
    further_reads: str | None = None
    ranks_per_chunk: str | None = None
    keeps_rows: bool = True

    def __call__(self, method: Method) -> Method:
        setattr(method, REGISTERED, self)
        return method


def registered_methods(worker_cls: object) -> dict[str, register]:
    """Finds the methods that `register` marked, inherited ones included."""
    registered = {}
    for name in dir(worker_cls):
        method = getattr(worker_cls, name)
        if hasattr(method, REGISTERED):
            registered[name] = getattr(method, REGISTERED)
    return registered


def split_batch(data: DataProto, reads: Iterable[str], chunks: int) -> list[DataProto]:
    """Splits a batch into equal chunks, with the fields that are read (none named: all) and `uid`.

    `uid` tells which rows belong together. Chunks are views: nothing is copied but where the rows
    do not divide. Then rows in which nothing is sampled are added behind the last.

    Five rows in three chunks, where `+` is an added row: [r0 r1] [r2 r3] [r4 +]
    """
    data = _with_fields(data, ("uid", *reads))
    if len(data) % chunks == 0:
        return data.chunk(chunks)
    size = math.ceil(len(data) / chunks)
    # At least one row is left for the chunks that are padded, as added rows are copies of it.
    unpadded = (len(data) - 1) // size
    unpadded_rows = unpadded * size
    padded = _pad(data.slice(unpadded_rows), (chunks - unpadded) * size)
    return data.slice(0, unpadded_rows).split(size) + padded.chunk(chunks - unpadded)


def _with_fields(data: DataProto, fields: tuple[str, ...]) -> DataProto:
    """Takes the named fields that the batch has; all fields if no tensor is among the named."""
    tensors = [name for name in fields if name in data.batch]
    if not tensors:
        return data
    arrays = [name for name in fields if name in data.non_tensor_batch]
    return data.select(tensors, arrays)


def _pad(data: DataProto, rows: int) -> DataProto:
    """Adds rows up to this number: dummies, or repeated prompts where nothing is sampled yet."""
    if "response_mask" in data.batch:
        return data.pad_with_dummies(rows)
    padded, _added = pad_dataproto_to_divisor(data, rows)
    return padded
