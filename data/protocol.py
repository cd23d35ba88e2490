"""DataProto: the one container in which a batch travels between driver, workers and users' code.

It owns three parts with the same rows: `batch` (tensors), `non_tensor_batch` (numpy arrays, mostly
of objects) and `meta_info` (values of the whole batch). Invariant: every tensor and array has
`len(self)` rows, and no two DataProtos share a `meta_info`, so that changing one never changes
another; tensors may be shared as views, and are not written to.

A batch of two rows, P = 3 prompt and R = 5 response positions; row 0 has two turns A0, A1 around an
answer E0:

    prompts        [. p p]   [p p p]            padded on the left
    responses      [a0 a0 e0 a1 .]   [a0 a0 a0 . .]   padded on the right
    response_mask  [1  1  0  1  0]   [1  1  1  0 0]   1 on what the policy sampled
    turn_ids       [0  0 -1  1 -1]   [0  0  0 -1 -1]

`fields.yaml` lists every field of a batch, with its writer. Masks are int8: a byte, and all works
that verl's users do with int64 masks (`mask.sum(dim=1)`, `mask * x`, `1 - mask`, `-mask`; bool
refuses the last two, uint8 wraps around). Token ids are int32; `.long()` makes an index of them.
What generation returns has no `input_ids` and `position_ids`, which say nothing new:
`torch.cat([prompts, responses], 1)` and `(attention_mask.cumsum(1) - 1).clamp(min=0)`.

A DataProto is pickled without the padding of its rows, and comes back bit for bit. The methods that
verl's users know and no run calls stand last.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from data.array_ops import (
    BatchError,
    Keys,
    RowIndex,
    merge_meta_info,
    object_array,
    pick,
    union_dicts,
)
from data.batch_fields import FIELDS as FIELDS
from data.batch_fields import Field as Field
from data.batch_parts import Columns, Tensors
from data.batch_parts import union_tensor_dict as union_tensor_dict
from data.plain_pickles import reading_plainly
from data.tensor_bytes import from_bytes, to_bytes

MetaInfo = dict[str, Any] | None
DUMMY_UID = "dummy"
GIB = 2**30


@dataclass
class DataProtoItem:
    """Holds one row of a DataProto; `batch` is None where that has no tensors."""

    batch: TensorDict = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    """Holds a batch of rows; the module's docstring explains its parts, `FIELDS` what they hold.

    `batch` is None where there are no tensors.
    """

    batch: TensorDict = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # None is verl's way to say that there are no columns.
        self.non_tensor_batch = Columns(self.non_tensor_batch or {})
        self.meta_info = dict(self.meta_info)
        self.check_consistency()

    # --- Building and converting ---

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, np.ndarray | Sequence[Any]] | None = None,
        meta_info: MetaInfo = None,
        num_batch_dims: int = 1,
    ) -> DataProto:
        """Makes a batch of tensors, and of arrays or sequences of as many rows.

        Raises:
            RuntimeError: of tensordict, where tensors differ in their first `num_batch_dims` sizes.
        """
        arrays = {}
        for name, values in (non_tensors or {}).items():
            arrays[name] = values if isinstance(values, np.ndarray) else object_array(values)
        batch = None
        if tensors:
            first = next(iter(tensors.values()))
            batch = Tensors(dict(tensors), batch_size=first.shape[:num_batch_dims])
        return cls(batch, arrays, meta_info or {})

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Tensor | np.ndarray], meta_info: MetaInfo = None
    ) -> DataProto:
        """Sorts tensors from arrays for `from_dict`.

        It takes what a DataLoader with the dataset's `collate_fn` yields.
        """
        tensors = {key: value for key, value in data.items() if isinstance(value, Tensor)}
        arrays = {key: value for key, value in data.items() if not isinstance(value, Tensor)}
        return cls.from_dict(tensors, arrays, meta_info)

    def __getstate__(self) -> dict[str, Any]:
        """Gives tensors as numpy bytes, without padding.

        So a view pickles its own rows only, and Ray copies them once.
        """
        return {
            "size": None if self.batch is None else tuple(self.batch.batch_size),
            "tensors": {key: to_bytes(tensor) for key, tensor in self.tensors().items()},
            "non_tensors": self.non_tensor_batch,
            "meta_info": self.meta_info,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the tensors on the CPU, where they may be written to."""
        self.batch = None
        if state["size"] is not None:
            tensors = {key: from_bytes(packed) for key, packed in state["tensors"].items()}
            self.batch = Tensors(tensors, batch_size=state["size"])
        self.non_tensor_batch = state["non_tensors"]
        self.meta_info = state["meta_info"]

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProto:
        batch = None if self.batch is None else self.batch.clone()
        arrays = copy.deepcopy(self.non_tensor_batch, memo)
        return DataProto(batch, arrays, copy.deepcopy(self.meta_info, memo))

    # --- Looking ---

    def __len__(self) -> int:
        if self.batch is not None and self.batch.batch_size:
            return self.batch.batch_size[0]
        for array in self.non_tensor_batch.values():
            return len(array)
        return 0

    def __getitem__(self, item: int | np.integer | slice | RowIndex) -> Any:
        """Returns a DataProtoItem for an int, else a DataProto: a view of a slice, or a copy."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, int | np.integer):
            return DataProtoItem(*self._at(int(item)))
        return self.select_idxs(item)

    def check_consistency(self) -> None:
        """Raises ValueError unless every tensor and array has the same number of rows."""
        rows = len(self)
        sizes = {key: tuple(array.shape[:1]) for key, array in self.non_tensor_batch.items()}
        if any(size != (rows,) for size in sizes.values()):
            raise BatchError(
                f"every field needs {rows} rows, as the first one has; non_tensor_batch has {sizes}"
            )

    def require(self, *fields: str, by: str) -> None:
        """Raises KeyError naming the first field that is missing and who should have written it."""
        present = self.tensors().keys() | self.non_tensor_batch.keys()
        for name in fields:
            if name in present:
                continue
            origin = "not a field of FIELDS"
            if name in FIELDS:
                known = FIELDS[name]
                origin = f"{known.shape} {known.dtype}, written by {known.writer}"
            there = ", ".join(sorted(present)) or "nothing"
            raise KeyError(f"{by} needs {name!r} ({origin}); the batch has {there}")

    # --- Columns ---

    def select(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Takes the named fields; None means all of that part, [] none of it.

        Tensors are shared.
        """
        tensors = pick(self.tensors(), batch_keys, "batch")
        arrays = pick(self.non_tensor_batch, non_tensor_batch_keys, "non_tensor_batch")
        meta_info = pick(self.meta_info, meta_info_keys, "meta_info")
        batch = None
        if self.batch is not None:
            batch = Tensors(tensors, batch_size=self.batch.batch_size)
        selected = DataProto(batch, arrays, meta_info)
        if deepcopy:
            return copy.deepcopy(selected)
        return selected

    def pop(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
    ) -> DataProto:
        """Moves the named fields out of this DataProto into a new one; None means none."""
        popped = self.select(batch_keys or [], non_tensor_batch_keys or [], meta_info_keys or [])
        if self.batch is not None:
            self.batch = self.batch.exclude(*(batch_keys or []))
        for key in popped.non_tensor_batch:
            del self.non_tensor_batch[key]
        for key in popped.meta_info:
            del self.meta_info[key]
        return popped

    def union(self, other: DataProto) -> DataProto:
        """Adds the other's fields to this one and returns self.

        Raises:
            ValueError: a shared field differs.
        """
        if self.batch is None:
            batch = other.batch
        elif other.batch is None:
            batch = self.batch
        else:
            batch = union_tensor_dict(self.batch, other.batch)
        arrays = union_dicts(self.non_tensor_batch, other.non_tensor_batch, "non_tensor_batch")
        meta_info = union_dicts(self.meta_info, other.meta_info, "meta_info")
        joined = DataProto(batch, arrays, meta_info)
        self.batch = joined.batch
        self.non_tensor_batch = joined.non_tensor_batch
        self.meta_info = joined.meta_info
        return self

    # --- Rows ---

    def select_idxs(self, idxs: RowIndex) -> DataProto:
        """Copies the rows at these positions, which may repeat.

        Or those where a boolean mask is true.
        """
        index = torch.as_tensor(idxs).cpu()
        if index.numel() == 0:
            index = index.long()
        return DataProto(*self._at(index))

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> DataProto:
        """Takes rows start to end as a view: no tensor is copied."""
        return DataProto(*self._at(slice(start, end, step)))

    def _at(self, place: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Takes from every part what is at a row, a slice or a tensor of positions."""
        # numpy takes a tensor of one entry for a number.
        rows = place.numpy() if isinstance(place, Tensor) else place
        arrays = {key: array[rows] for key, array in self.non_tensor_batch.items()}
        batch = None if self.batch is None else self.batch[place]
        return batch, arrays, dict(self.meta_info)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Repeats every row `repeat_times` times: 0 0 1 1 when interleaved, else 0 1 0 1."""
        rows = torch.arange(len(self))
        if interleave:
            return self.select_idxs(rows.repeat_interleave(repeat_times))
        return self.select_idxs(rows.repeat(repeat_times))

    def split(self, split_size: int) -> list[DataProto]:
        """Cuts views of `split_size` rows each; the last may be shorter."""
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def chunk(self, chunks: int) -> list[DataProto]:
        """Cuts `chunks` views of equal size; ValueError if the rows do not divide."""
        if chunks < 1 or len(self) % chunks:
            raise BatchError(
                f"{len(self)} rows do not divide into {chunks} equal chunks; pad with "
                "pad_dataproto_to_divisor or DataProto.pad_with_dummies first"
            )
        size = len(self) // chunks
        return [self.slice(i * size, (i + 1) * size) for i in range(chunks)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Joins the rows of all, in order. Every part needs the same fields.

        meta_info must agree, except `metrics` (name -> number or list), whose values are gathered
        into lists.
        """
        if not data:
            raise BatchError("DataProto.concat needs at least one DataProto; given an empty list")
        first = data[0]
        for position, part in enumerate(data):
            difference = part.tensors().keys() ^ first.tensors().keys()
            difference |= part.non_tensor_batch.keys() ^ first.non_tensor_batch.keys()
            if difference:
                raise BatchError(
                    f"concat needs the same fields; part {position} and part 0 differ in "
                    f"{difference}"
                )
        batch = None
        if first.batch is not None:
            batch = torch.cat([part.batch for part in data], dim=0)
        arrays = {}
        for key in first.non_tensor_batch:
            arrays[key] = np.concatenate([part.non_tensor_batch[key] for part in data])
        return DataProto(batch, arrays, merge_meta_info([part.meta_info for part in data]))

    # --- Padding ---

    def pad_with_dummies(self, divisor: int) -> DataProto:
        """Adds dummies until `divisor` divides the rows (`select_or_dummies`).

        What divides already is shared.
        """
        missing = -len(self) % divisor
        if missing == 0:
            return self.select()
        return self.select_or_dummies(range(len(self) + missing))

    def select_or_dummies(self, rows: Sequence[int]) -> DataProto:
        """Copies the rows at these positions; a position past the last makes a dummy.

        That is row 0 with response_mask 0 and uid "dummy". Such rows cost a forward pass but enter
        no loss, group or average; `drop_dummies` takes them out again.
        """
        self.require("response_mask", "uid", by="dummy rows")
        index = np.asarray(rows)
        is_dummy = index >= len(self)
        chosen = self.select_idxs(np.where(is_dummy, 0, index))
        dummies = torch.as_tensor(is_dummy)
        tensors = chosen.tensors()
        tensors["response_mask"][dummies] = 0
        for name in ("turn_ids", "row_number"):
            if name in tensors:
                tensors[name][dummies] = -1
        columns = chosen.non_tensor_batch
        for name in ("uid", "episode_id"):
            if name in columns:
                columns[name] = np.where(is_dummy, DUMMY_UID, columns[name].astype(object))
        return chosen

    def drop_dummies(self) -> DataProto:
        """Copies the rows that `pad_with_dummies` did not add.

        A real row of empty response stays.
        """
        self.require("uid", by="drop_dummies")
        return self.select_idxs(self.non_tensor_batch["uid"].astype(object) != DUMMY_UID)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by name; none where `batch` is None."""
        if self.batch is None:
            return {}
        return dict(self.batch.items())

    # --- Disk ---

    def save_to_disk(self, filepath: str | Path) -> None:
        """Writes tensors and JSON, never a pickle: loading runs no code.

        JSON's limits apply to object arrays and meta_info: tuples come back as lists, dict keys as
        strings, numpy values as Python's. A value that JSON cannot hold raises
        TypeError naming the field.
        """
        arrays = {}
        objects = {}
        for key, array in self.non_tensor_batch.items():
            if array.dtype.kind in "biuf":
                arrays[key] = torch.from_numpy(array.copy())
            else:
                objects[key] = _to_json(array, f"non_tensor_batch[{key!r}]")
        meta_info = {}
        for key, value in self.meta_info.items():
            meta_info[key] = _to_json(value, f"meta_info[{key!r}]")
        tensors = None
        if self.batch is not None:
            # A view would drag its whole storage into the file.
            tensors = {key: tensor.detach().clone() for key, tensor in self.tensors().items()}
        content = {
            "rows": len(self),
            "tensors": tensors,
            "arrays": arrays,
            "objects": objects,
            "meta_info": meta_info,
        }
        torch.save(content, filepath)

    @classmethod
    def load_from_disk(cls, filepath: str | Path) -> DataProto:
        """Reads what `save_to_disk` wrote, onto the CPU."""
        with reading_plainly(filepath):
            content = torch.load(filepath, weights_only=True, map_location="cpu")
        arrays = {key: array.numpy() for key, array in content["arrays"].items()}
        for key, text in content["objects"].items():
            arrays[key] = object_array(json.loads(text))
        meta_info = {key: json.loads(text) for key, text in content["meta_info"].items()}
        batch = None
        if content["tensors"] is not None:
            batch = Tensors(content["tensors"], batch_size=[content["rows"]])
        return cls(batch, arrays, meta_info)

    # --- Methods that verl's users know and no run calls ---

    @classmethod
    def from_items(cls, data_list: Sequence[Any]) -> DataProto:
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
        return cls(batch, arrays, first.meta_info)

    @classmethod
    def from_tensordict(
        cls,
        tensor_dict: TensorDict,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> DataProto:
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
        return cls.from_dict(tensors, arrays, all_meta_info, num_batch_dims)

    def to_tensordict(self) -> TensorDict:
        """Makes one TensorDict of everything.

        Arrays become NonTensorStack (an entry a row), meta_info NonTensorData.
        """
        entries: dict[str, Any] = self.tensors()
        for key, array in self.non_tensor_batch.items():
            entries[key] = NonTensorStack(*array.tolist())
        for key, value in self.meta_info.items():
            entries[key] = NonTensorData(value, batch_size=[len(self)])
        return TensorDict(entries, batch_size=[len(self)])

    def get_data_info(self) -> str:
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

    def print_size(self, prefix: str = "") -> None:
        """Prints the size in GiB; objects count as their pointers only."""
        tensors = sum(t.numel() * t.element_size() for t in self.tensors().values()) / GIB
        arrays = sum(array.nbytes for array in self.non_tensor_batch.values()) / GIB
        if prefix:
            prefix = f"{prefix} "
        print(f"{prefix}{len(self)} rows, tensors {tensors:.3f} GiB, arrays {arrays:.3f} GiB")

    def rename(
        self,
        old_keys: str | Sequence[str] | None = None,
        new_keys: str | Sequence[str] | None = None,
    ) -> DataProto:
        """Renames tensors in place and returns self.

        Raises:
            KeyError: a name is not there, or a new one is taken.
        """
        for old, new in zip(_as_list(old_keys), _as_list(new_keys), strict=True):
            self.batch.rename_key_(old, new, safe=True)
        return self

    def to(self, device: str | torch.device) -> DataProto:
        """Moves the tensors in place and returns self."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def reorder(self, indices: RowIndex) -> None:
        """Puts the rows into this order, in place."""
        ordered = self.select_idxs(indices)
        self.batch = ordered.batch
        self.non_tensor_batch = ordered.non_tensor_batch

    def padding(self, padding_size: int, padding_candidate: str = "") -> DataProto:
        """Appends `padding_size` copies of a row in place and returns self.

        Args:
            padding_candidate: "first", or the last row ("last" or "").
        """
        last = len(self) - 1
        row = 0 if padding_candidate == "first" else last
        self.reorder([*range(len(self)), *[row] * padding_size])
        return self

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | Tensor) -> DataProto:
        """Repeats row i `repeat_times[i]` times, in place of its first."""
        times = torch.as_tensor(repeat_times).cpu()
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(times))

    def unfold_column_chunks(
        self, n_split: int, split_keys: Sequence[str] | None = None
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

    def fold_batch_dim(self, new_batch_size: int) -> DataProto:
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

    def unfold_batch_dim(self, batch_dims: int = 2) -> DataProto:
        """Undoes `fold_batch_dim`: the first `batch_dims` dimensions become one."""
        arrays = {}
        for key, array in self.non_tensor_batch.items():
            arrays[key] = array.reshape(-1, *array.shape[batch_dims:])
        tensors = {}
        for key, tensor in self.tensors().items():
            tensors[key] = tensor.reshape(-1, *tensor.shape[batch_dims:])
        return type(self).from_dict(tensors, arrays, self.meta_info)

    def make_iterator(
        self,
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

    def _mini_batches(
        self, size: int, epochs: int, seed: int | None, shuffle: bool
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


# verl's name.
collate_fn = DataProto.from_items


@dataclass
class DataProtoFuture:
    """Stands for a DataProto that workers still compute, to be passed on without waiting for it.

    `resolve` turns one future into its value (`ray.get` for Ray's; by default `future.result()`),
    `collect_fn` joins the values, and `parts` holds the chunks taken since, as (number of chunks,
    position).
    """

    collect_fn: Callable[[list[Any]], Any]
    futures: list[Any]
    resolve: Callable[[Any], Any] = methodcaller("result")
    parts: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def concat(futures: list[Any], **kwargs: Any) -> DataProtoFuture:
        """Makes a future of the futures' values, concatenated."""
        return DataProtoFuture(DataProto.concat, futures, **kwargs)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Makes one future per chunk; nothing is computed before `get`."""
        return [replace(self, parts=(*self.parts, (chunks, i))) for i in range(chunks)]

    def get(self) -> Any:
        """Waits for every future, joins their values, and takes this future's chunk."""
        data = self.collect_fn([self.resolve(future) for future in self.futures])
        for chunks, position in self.parts:
            data = data.chunk(chunks)[position]
        return data


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


def _to_json(value: Any, where: str) -> str:
    """Writes JSON text, numpy values as Python's; TypeError names the field `where`."""

    def plain(item: Any) -> Any:
        if isinstance(item, np.ndarray | np.generic):
            return item.tolist()
        raise TypeError(
            f"{where} holds a {type(item).__name__}, which JSON cannot: save_to_disk takes str, "
            "numbers, None, lists and dicts there. Convert or pop it first"
        )

    return json.dumps(value, default=plain)


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
