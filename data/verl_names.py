"""What verl's users know of DataProto and no run here calls: further methods, futures, and two functions over rows.

`data.protocol` offers all of it under verl's names; nothing here may import it while running. Invariant: as there, a
method hands out new DataProtos or changes its own in place, and never another's `meta_info`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from data.containers import RowIndex, object_array, pick, union_dicts

AUTO_PADDING = "_verl_auto_padding"
MetaInfo = dict[str, Any] | None


class DataProtoConfig:
    """Names the entry of meta_info by which a DataProto says that it may be cut unevenly (`auto_padding=`)."""

    auto_padding_key = AUTO_PADDING


class VerlMethods:
    """Holds the methods of verl's DataProto that no run calls; DataProto inherits them."""

    batch: TensorDict
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]

    if TYPE_CHECKING:
        # What the methods below call, and DataProto defines.

        def __init__(self, batch: TensorDict, non_tensor_batch: dict[str, Any], meta_info: dict[str, Any]) -> None: ...
        def __len__(self) -> int: ...
        def _tensors(self) -> dict[str, Tensor]: ...
        def select_idxs(self, idxs: RowIndex) -> Self: ...
        def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self: ...
        def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self: ...
        @classmethod
        def from_dict(cls, *args: Any, **kwargs: Any) -> Self: ...

    def is_padding_enabled(self) -> bool:
        """Says whether the rows may be cut unevenly."""
        return bool(self.meta_info.get(AUTO_PADDING))

    # --- Building and converting ---

    @classmethod
    def from_items(cls, data_list: Sequence[Any]) -> Self:
        """Stacks rows into a batch: the inverse of indexing by int. meta_info is the first row's."""
        first = data_list[0]
        batch = None if first.batch is None else torch.stack([row.batch for row in data_list])
        arrays = {key: object_array([row.non_tensor_batch[key] for row in data_list]) for key in first.non_tensor_batch}
        return cls(batch, arrays, first.meta_info)

    @classmethod
    def from_tensordict(cls, tensor_dict: TensorDict, meta_info: MetaInfo = None, num_batch_dims: int = 1) -> Self:
        """Undoes `to_tensordict`; `meta_info` adds to what the TensorDict carries."""
        values = dict(tensor_dict.items())
        return cls.from_dict(
            {key: value for key, value in values.items() if isinstance(value, Tensor)},
            {key: value.tolist() for key, value in values.items() if isinstance(value, NonTensorStack)},
            {key: value.data for key, value in values.items() if isinstance(value, NonTensorData)} | (meta_info or {}),
            num_batch_dims,
        )

    def to_tensordict(self) -> TensorDict:
        """Makes one TensorDict: arrays as NonTensorStack (one entry per row), meta_info as NonTensorData."""
        merged = TensorDict(self._tensors(), batch_size=[len(self)])
        for key, array in self.non_tensor_batch.items():
            merged[key] = NonTensorStack(*array.tolist())
        for key, value in self.meta_info.items():
            merged[key] = NonTensorData(value, batch_size=[len(self)])
        return merged

    def save_to_disk(self, filepath: str | Path) -> None:
        """Writes tensors and JSON, never a pickle: loading runs no code.

        JSON's limits apply to object arrays and meta_info: tuples come back as lists, dict keys as strings, numpy
        values as Python's. What JSON cannot hold raises TypeError naming the field.
        """
        numeric = {key: array for key, array in self.non_tensor_batch.items() if array.dtype.kind in "biuf"}
        objects = {key: array for key, array in self.non_tensor_batch.items() if key not in numeric}
        content = {
            "rows": len(self),
            # A view would drag its whole storage into the file.
            "tensors": None if self.batch is None else {key: t.detach().clone() for key, t in self._tensors().items()},
            "arrays": {key: torch.from_numpy(array.copy()) for key, array in numeric.items()},
            "objects": {key: _to_json(array, f"non_tensor_batch[{key!r}]") for key, array in objects.items()},
            "meta_info": {key: _to_json(value, f"meta_info[{key!r}]") for key, value in self.meta_info.items()},
        }
        torch.save(content, filepath)

    @classmethod
    def load_from_disk(cls, filepath: str | Path) -> Self:
        """Reads what `save_to_disk` wrote, onto the CPU."""
        content = torch.load(filepath, weights_only=True, map_location="cpu")
        tensors = content["tensors"]
        arrays = {key: array.numpy() for key, array in content["arrays"].items()}
        arrays |= {key: object_array(json.loads(text)) for key, text in content["objects"].items()}
        batch = None if tensors is None else TensorDict(tensors, batch_size=[content["rows"]])
        return cls(batch, arrays, {key: json.loads(text) for key, text in content["meta_info"].items()})

    # --- Looking ---

    def get_data_info(self) -> str:
        """Describes each field on a line: name, shape, dtype and device, or the type of its objects."""
        lines = [f"{key}: {tuple(t.shape)} {t.dtype} {t.device}" for key, t in self._tensors().items()]
        for key, array in self.non_tensor_batch.items():
            content = type(array[0]).__name__ if array.dtype == object and len(array) else str(array.dtype)
            lines.append(f"{key}: {array.shape} {content}")
        return "\n".join(lines + [f"meta_info {key}: {type(v).__name__}" for key, v in self.meta_info.items()])

    def print_size(self, prefix: str = "") -> None:
        """Prints the size in GiB; objects count as their pointers only."""
        tensors = sum(t.numel() * t.element_size() for t in self._tensors().values()) / 2**30
        arrays = sum(array.nbytes for array in self.non_tensor_batch.values()) / 2**30
        print(f"{prefix}{' ' if prefix else ''}{len(self)} rows, tensors {tensors:.3f} GiB, arrays {arrays:.3f} GiB")

    # --- Columns ---

    def rename(self, old_keys: str | Sequence[str] | None = None, new_keys: str | Sequence[str] | None = None) -> Self:
        """Renames tensors in place and returns self."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys or [])
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys or [])
        if len(old) != len(new):
            raise ValueError(f"rename needs as many new names as old ones; given {old} and {new}")
        pick(self._tensors(), old, "batch")
        names = dict(zip(old, new, strict=True))
        renamed = {names.get(key, key): tensor for key, tensor in self._tensors().items()}
        if len(renamed) != len(self._tensors()):
            raise ValueError(f"rename {names} would overwrite a field of the batch: {', '.join(self._tensors())}")
        if self.batch is not None:
            self.batch = TensorDict(renamed, batch_size=self.batch.batch_size)
        return self

    def to(self, device: str | torch.device) -> Self:
        """Moves the tensors in place and returns self."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    # --- Rows ---

    def reorder(self, indices: RowIndex) -> None:
        """Puts the rows into this order, in place."""
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def padding(self, padding_size: int, padding_candidate: str = "") -> Self:
        """Appends `padding_size` copies of a row in place and returns self: "first", or the last ("last" or "")."""
        if padding_candidate not in ("", "first", "last"):
            raise ValueError(f"padding_candidate={padding_candidate!r} is unknown; allowed: 'first', 'last'")
        rows = torch.arange(len(self) + padding_size)
        rows[len(self) :] = 0 if padding_candidate == "first" else len(self) - 1
        self.reorder(rows)
        return self

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | Tensor) -> Self:
        """Repeats row i `repeat_times[i]` times, in place of its first."""
        times = torch.as_tensor(repeat_times).cpu()
        if times.shape != (len(self),):
            raise ValueError(f"repeat_times needs one count per row, {len(self)}; its shape is {tuple(times.shape)}")
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(times))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Cuts the second dimension of `split_keys` into n_split rows: (B, n·L, …) -> (B·n, L, …); repeats all others.

        Row b's chunks become rows b·n … b·n + n-1, so pairs stored side by side stay neighbours.
        """
        cut = pick(self._tensors() | self.non_tensor_batch, list(split_keys or []), "DataProto")
        for key, value in cut.items():
            if value.ndim < 2 or value.shape[1] % n_split:
                raise ValueError(f"{key!r} of shape {tuple(value.shape)} cannot be cut into {n_split} columns")
            cut[key] = value.reshape(value.shape[0] * n_split, value.shape[1] // n_split, *value.shape[2:])
        unfolded = self.repeat(n_split)
        if unfolded.batch is not None:
            unfolded.batch.update({key: value for key, value in cut.items() if isinstance(value, Tensor)})
        unfolded.non_tensor_batch |= {key: value for key, value in cut.items() if isinstance(value, np.ndarray)}
        return unfolded

    def make_iterator(
        self, mini_batch_size: int, epochs: int, seed: int | None = None, dataloader_kwargs: dict | None = None
    ) -> Iterator[Self]:
        """Yields mini-batches of `mini_batch_size` rows, `epochs` times over, in a new order each where asked to.

        Args:
            seed: of the orders, which torch's global generator draws where it is None.
            dataloader_kwargs: `{"shuffle": True}` asks for random orders; nothing else is taken.
        Raises: ValueError, before the first mini-batch, for another option or a size that does not divide the rows.
        """
        options = {"shuffle": False, **(dataloader_kwargs or {})}
        if options.keys() != {"shuffle"}:
            raise ValueError(f"dataloader_kwargs takes 'shuffle' only; given {dataloader_kwargs}")
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ValueError(f"mini_batch_size={mini_batch_size} must divide the batch's {len(self)} rows")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return self._mini_batches(mini_batch_size, epochs, options["shuffle"], generator)

    def _mini_batches(self, size: int, epochs: int, shuffle: bool, generator: torch.Generator | None) -> Iterator[Self]:
        for _ in range(epochs):
            order = torch.randperm(len(self), generator=generator) if shuffle else torch.arange(len(self))
            yield from map(self.select_idxs, order.split(size))


Rows = TypeVar("Rows", bound=VerlMethods)


@dataclass
class DataProtoFuture:
    """Stands for a DataProto that workers are still computing, to be passed on without waiting for it.

    `resolve` turns one future into its value (`ray.get` for Ray's; by default `future.result()`), `collect_fn` joins
    the values, and `parts` holds the chunks taken since, as (number of chunks, position).
    """

    collect_fn: Callable[[list[Any]], Any]
    futures: list[Any]
    resolve: Callable[[Any], Any] = methodcaller("result")
    parts: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def concat(futures: list[Any], **kwargs: Any) -> DataProtoFuture:
        """Makes a future of the futures' values, concatenated."""
        return DataProtoFuture(_concat, futures, **kwargs)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Makes one future per chunk; nothing is computed before `get`."""
        return [replace(self, parts=(*self.parts, (chunks, position))) for position in range(chunks)]

    def get(self) -> Any:
        """Waits for every future, joins their values, and takes this future's chunk."""
        data = self.collect_fn([self.resolve(future) for future in self.futures])
        for chunks, position in self.parts:
            data = data.chunk(chunks)[position]
        return data


def unpad_dataproto(data: Rows, pad_size: int) -> Rows:
    """Takes off the last `pad_size` rows."""
    return data.slice(0, len(data) - pad_size) if pad_size else data


def union_two_dict(dict1: dict[str, Any], dict2: dict[str, Any]) -> dict[str, Any]:
    """Adds the second's entries to the first, which is returned; ValueError where a shared one differs."""
    dict1.update(union_dicts(dict1, dict2, "dict"))
    return dict1


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Does for arrays what `union_two_dict` does; NaN equals NaN."""
    return union_two_dict(tensor_dict1, tensor_dict2)


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Turns rows into columns; every dict has the first one's keys, else KeyError."""
    return {key: [entry[key] for entry in list_of_dict] for key in (list_of_dict[0] if list_of_dict else {})}


def fold_batch_dim(data: Rows, new_batch_size: int) -> Rows:
    """Views B rows as (new_batch_size, B / new_batch_size), for what is to be cut by the first of the two."""
    if len(data) % new_batch_size:
        raise ValueError(f"{len(data)} rows do not fold into {new_batch_size} equal parts")
    batch = data.batch.view(new_batch_size, -1).auto_batch_size_(batch_dims=1)
    arrays = {k: v.reshape(new_batch_size, -1, *v.shape[1:]) for k, v in data.non_tensor_batch.items()}
    return type(data)(batch, arrays, data.meta_info)


def unfold_batch_dim(data: Rows, batch_dims: int = 2) -> Rows:
    """Undoes `fold_batch_dim`: views the first `batch_dims` sizes as one."""
    batch = data.batch.clone(recurse=False).auto_batch_size_(batch_dims=batch_dims).view(-1)
    arrays = {k: v.reshape(len(batch), *v.shape[batch_dims:]) for k, v in data.non_tensor_batch.items()}
    return type(data)(batch, arrays, data.meta_info)


def all_gather_data_proto(data: Any, process_group: torch.distributed.ProcessGroup) -> None:
    """Has `data` hold the rows of all ranks of the group, in their order; on the device that it is on."""
    parts: list[Any] = [None] * torch.distributed.get_world_size(process_group)
    torch.distributed.all_gather_object(parts, data, process_group)
    joined, device = type(data).concat(parts), data.batch.device
    data.batch = joined.batch if device is None else joined.batch.to(device)
    data.non_tensor_batch = joined.non_tensor_batch


def serialize_single_tensor(obj: Tensor) -> tuple[str, tuple[int, ...], memoryview]:
    """Returns (dtype, shape, bytes) of a tensor, which a message can carry."""
    flat = obj.detach().cpu().contiguous().flatten().view(torch.uint8)
    return str(obj.dtype).removeprefix("torch."), tuple(obj.shape), memoryview(flat.numpy())


def deserialize_single_tensor(arr: tuple[str, Sequence[int], Any]) -> Tensor:
    """Undoes `serialize_single_tensor`; the tensor has memory of its own."""
    dtype, shape, buffer = arr
    tensor = torch.empty(tuple(shape), dtype=getattr(torch, dtype))
    tensor.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(buffer, dtype=np.uint8)
    return tensor


def serialize_tensordict(batch: TensorDict) -> tuple[tuple[int, ...], str | None, dict[str, Any]]:
    """Returns (batch size, device, name -> serialized tensor)."""
    tensors = {name: serialize_single_tensor(tensor) for name, tensor in batch.items()}
    return tuple(batch.batch_size), None if batch.device is None else str(batch.device), tensors


def deserialize_tensordict(arr: tuple[Sequence[int], str | None, Mapping[str, Any]]) -> TensorDict:
    """Undoes `serialize_tensordict`."""
    size, device, tensors = arr
    own = {name: deserialize_single_tensor(tensor) for name, tensor in tensors.items()}
    return TensorDict(own, batch_size=list(size), device=device)


def _concat(values: list[Any]) -> Any:
    if not values:
        raise ValueError("DataProtoFuture needs at least one future; given an empty list")
    return values[0].concat(values)


def _to_json(value: Any, where: str) -> str:
    """Writes JSON text, numpy values as Python's; TypeError names the field `where`."""

    def plain(item: Any) -> Any:
        if isinstance(item, np.ndarray | np.generic):
            return item.tolist()
        raise TypeError(
            f"{where} holds a {type(item).__name__}, which JSON cannot: save_to_disk takes str, numbers, None, "
            "lists and dicts there. Convert or pop it first"
        )

    return json.dumps(value, default=plain)
