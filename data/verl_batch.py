"""Adds to DataProto what verl's users know of it and no run calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from data.array_ops import BatchError, RowIndex, object_array, pick

if TYPE_CHECKING:
    from data.protocol import DataProto

GIB = 2**30


class VerlMethods:
    """Holds the methods; only DataProto derives from it."""

    batch: Any
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]

    # --- Converting ---

    @classmethod
    def from_items(cls, data_list: Sequence[Any]) -> Self:
        """Stacks rows into a batch.

        The inverse of indexing by int. meta_info is the first row's.
        """
        first = data_list[0]
        batch = None
        if first.batch is not None:
            batch = torch.stack([row.batch for row in data_list])
        arrays = {}
        for key in first.non_tensor_batch:
            arrays[key] = object_array([row.non_tensor_batch[key] for row in data_list])
        return cls(batch, arrays, first.meta_info)  # type: ignore[call-arg]

    @classmethod
    def from_tensordict(
        cls,
        tensor_dict: TensorDict,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> Self:
        """Undoes `to_tensordict`; `meta_info` adds to what the TensorDict carries."""
        tensors = {}
        arrays = {}
        all_meta_info = {}
        for key, value in tensor_dict.items():
            if isinstance(value, Tensor):
                tensors[key] = value
            elif isinstance(value, NonTensorStack):
                arrays[key] = value.tolist()
            elif isinstance(value, NonTensorData):
                all_meta_info[key] = value.data
        all_meta_info.update(meta_info or {})
        return cls.from_dict(tensors, arrays, all_meta_info, num_batch_dims)  # type: ignore[attr-defined]

    def to_tensordict(self: DataProto) -> TensorDict:  # type: ignore[misc]
        """Makes one TensorDict of everything.

        Arrays become NonTensorStack (an entry a row), meta_info NonTensorData.
        """
        entries: dict[str, Any] = self.tensors()
        for key, array in self.non_tensor_batch.items():
            entries[key] = NonTensorStack(*array.tolist())
        for key, value in self.meta_info.items():
            entries[key] = NonTensorData(value, batch_size=[len(self)])
        return TensorDict(entries, batch_size=[len(self)])

    # --- Looking ---

    def get_data_info(self: DataProto) -> str:  # type: ignore[misc]
        """Describes each field on a line: name, shape, dtype and device, or its objects' type."""
        lines = []
        for key, tensor in self.tensors().items():
            lines.append(f"{key}: {tuple(tensor.shape)} {tensor.dtype} {tensor.device}")
        for key, array in self.non_tensor_batch.items():
            content = str(array.dtype)
            if array.dtype == object and len(array) > 0:
                content = type(array[0]).__name__
            lines.append(f"{key}: {array.shape} {content}")
        for key, value in self.meta_info.items():
            lines.append(f"meta_info {key}: {type(value).__name__}")
        return "\n".join(lines)

    def print_size(self: DataProto, prefix: str = "") -> None:  # type: ignore[misc]
        """Prints the size in GiB; objects count as their pointers only."""
        tensors = sum(t.numel() * t.element_size() for t in self.tensors().values()) / GIB
        arrays = sum(array.nbytes for array in self.non_tensor_batch.values()) / GIB
        if prefix:
            prefix = f"{prefix} "
        print(f"{prefix}{len(self)} rows, tensors {tensors:.3f} GiB, arrays {arrays:.3f} GiB")

    # --- Columns ---

    def rename(
        self,
        old_keys: str | Sequence[str] | None = None,
        new_keys: str | Sequence[str] | None = None,
    ) -> Self:
        """Renames tensors in place and returns self.

        Raises:
            KeyError: a name is not there, or a new one is taken.
        """
        for old, new in zip(_as_list(old_keys), _as_list(new_keys), strict=True):
            self.batch.rename_key_(old, new, safe=True)
        return self

    def to(self, device: str | torch.device) -> Self:
        """Moves the tensors in place and returns self."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    # --- Rows ---

    def reorder(self: DataProto, indices: RowIndex) -> None:  # type: ignore[misc]
        """Puts the rows into this order, in place."""
        ordered = self.select_idxs(indices)
        self.batch = ordered.batch
        self.non_tensor_batch = ordered.non_tensor_batch

    def padding(self: DataProto, padding_size: int, padding_candidate: str = "") -> DataProto:  # type: ignore[misc]
        """Appends `padding_size` copies of a row in place and returns self.

        Args:
            padding_candidate: "first", or the last row ("last" or "").
        """
        last = len(self) - 1
        row = 0 if padding_candidate == "first" else last
        self.reorder([*range(len(self)), *[row] * padding_size])
        return self

    def sample_level_repeat(  # type: ignore[misc]
        self: DataProto, repeat_times: Sequence[int] | np.ndarray | Tensor
    ) -> DataProto:
        """Repeats row i `repeat_times[i]` times, in place of its first."""
        times = torch.as_tensor(repeat_times).cpu()
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(times))

    def unfold_column_chunks(  # type: ignore[misc]
        self: DataProto, n_split: int, split_keys: Sequence[str] | None = None
    ) -> DataProto:
        """Cuts the second dimension of `split_keys` into n_split rows, and repeats all others.

        (B, n·L, …) becomes (B·n, L, …). Row b's chunks become rows b·n … b·n + n-1, so pairs stored
        side by side stay neighbours. In a column of lists each list is cut.
        """
        unfolded = self.repeat(n_split)
        fields = {**self.tensors(), **self.non_tensor_batch}
        for key, value in pick(fields, list(split_keys or []), "DataProto").items():
            if value.ndim == 1:
                unfolded.non_tensor_batch[key] = _cut_lists(value, n_split, key)
                continue
            rows, width, *rest = value.shape
            chunks = value.reshape(rows * n_split, width // n_split, *rest)
            if isinstance(value, Tensor):
                unfolded.batch[key] = chunks
            else:
                unfolded.non_tensor_batch[key] = chunks
        return unfolded

    def fold_batch_dim(self: DataProto, new_batch_size: int) -> DataProto:  # type: ignore[misc]
        """Makes new_batch_size rows of as many old ones each: (B, …) becomes (N, B / N, …).

        Raises:
            BatchError: the rows do not divide.
        """
        if new_batch_size < 1 or len(self) % new_batch_size:
            raise BatchError(
                f"{len(self)} rows do not fold into {new_batch_size}: give a divisor of them"
            )
        arrays = {}
        for key, array in self.non_tensor_batch.items():
            arrays[key] = array.reshape(new_batch_size, -1, *array.shape[1:])
        tensors = {}
        for key, tensor in self.tensors().items():
            tensors[key] = tensor.reshape(new_batch_size, -1, *tensor.shape[1:])
        return type(self).from_dict(tensors, arrays, self.meta_info)

    def unfold_batch_dim(self: DataProto, batch_dims: int = 2) -> DataProto:  # type: ignore[misc]
        """Undoes `fold_batch_dim`: the first `batch_dims` dimensions become one."""
        arrays = {}
        for key, array in self.non_tensor_batch.items():
            arrays[key] = array.reshape(-1, *array.shape[batch_dims:])
        tensors = {}
        for key, tensor in self.tensors().items():
            tensors[key] = tensor.reshape(-1, *tensor.shape[batch_dims:])
        return type(self).from_dict(tensors, arrays, self.meta_info)

    def make_iterator(  # type: ignore[misc]
        self: DataProto,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict | None = None,
    ) -> Iterator[DataProto]:
        """Yields mini-batches of `mini_batch_size` rows, `epochs` times over.

        Args:
            seed: of the orders, which torch's global generator draws where it is None.
            dataloader_kwargs: `{"shuffle": True}` asks for a new random order each time; nothing
                else is read.
        Raises:
            BatchError: before the first mini-batch, for a size that does not divide the rows.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise BatchError(
                f"mini_batch_size={mini_batch_size} must divide the batch's {len(self)} rows"
            )
        shuffle = (dataloader_kwargs or {}).get("shuffle", False)
        return self._mini_batches(mini_batch_size, epochs, seed, shuffle)

    def _mini_batches(  # type: ignore[misc]
        self: DataProto, size: int, epochs: int, seed: int | None, shuffle: bool
    ) -> Iterator[DataProto]:
        generator = None
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            order = torch.arange(len(self))
            if shuffle:
                order = torch.randperm(len(self), generator=generator)
            for rows in order.split(size):
                yield self.select_idxs(rows)


def _cut_lists(column: np.ndarray, n_split: int, key: str) -> np.ndarray:
    """Cuts the list in each row of a column into n_split equal ones, a row each."""
    chunks = []
    for entry in column:
        size, rest = divmod(len(entry), n_split)
        if rest:
            raise BatchError(
                f"unfold_column_chunks: a list of {len(entry)} in {key!r} does not divide into "
                f"{n_split}"
            )
        chunks += [entry[part * size : (part + 1) * size] for part in range(n_split)]
    return object_array(chunks)


def _as_list(keys: str | Sequence[str] | None) -> list[str]:
    if isinstance(keys, str):
        return [keys]
    return list(keys or [])


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Appends rows from the start until `size_divisor` divides the rows.

    Returns: the batch, and how many rows were added.
    """
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data, 0
    rows = torch.arange(len(data) + pad_size) % len(data)
    return data.select_idxs(rows), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Takes off the last `pad_size` rows."""
    if pad_size == 0:
        return data
    return data.slice(0, len(data) - pad_size)
