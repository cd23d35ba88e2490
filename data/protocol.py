"""DataProto: the one container in which a batch travels between driver, workers and the user's code.

It owns three parts with the same rows: `batch` (tensors), `non_tensor_batch` (numpy arrays, mostly of objects) and
`meta_info` (facts about the whole batch). Invariant: every tensor and array has `len(self)` rows, and no two DataProtos
share a `meta_info`, so that changing one never changes another; tensors may be shared as views, and are not written to.

A batch of two rows, P = 3 prompt and R = 5 response positions; row 0 has two turns A0, A1 around an answer E0:

    prompts        [. p p]   [p p p]            padded on the left
    responses      [a0 a0 e0 a1 .]   [a0 a0 a0 . .]   padded on the right
    response_mask  [1  1  0  1  0]   [1  1  1  0 0]   1 on what the policy sampled
    turn_ids       [0  0 -1  1 -1]   [0  0  0 -1 -1]

`fields.yaml` lists every field of a batch, with its writer. Masks are int8: a byte, and all works that verl's users do
with int64 masks (`mask.sum(dim=1)`, `mask * x`, `1 - mask`, `-mask`; bool refuses the last two, uint8 wraps around).
Token ids are int32; `.long()` makes an index of them. What generation returns has no `input_ids` and `position_ids`,
which say nothing new: `torch.cat([prompts, responses], 1)` and `(attention_mask.cumsum(1) - 1).clamp(min=0)`.

A DataProto is pickled without the padding of its rows, and comes back bit for bit. Its last methods are those that
verl's users know and no run calls.
"""

from __future__ import annotations

import copy
import json
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from data.containers import (
    Keys,
    RowIndex,
    from_bytes,
    merge_meta_info,
    object_array,
    pick,
    to_bytes,
    union_dicts,
)
from data.texts import say, table

MetaInfo = dict[str, Any] | None
DUMMY_UID = "dummy"


# What one field holds; B = rows, P = prompt length, R = response length, in tokens.
Field = namedtuple("Field", ("shape", "dtype", "writer", "meaning"))
FIELDS: dict[str, Field] = {
    name: Field(*entry) for name, entry in table(__file__, "fields").items()
}


class Tensors(TensorDict):
    """Is a TensorDict whose KeyError says what there is, and where everything else is."""

    def __getitem__(self, index: Any) -> Any:
        try:
            return super().__getitem__(index)
        except KeyError:
            raise KeyError(
                say("no_tensor", key=index, there=", ".join(map(str, self.keys())) or "nothing")
            ) from None


class Columns(dict[str, Any]):
    """Is a dict whose KeyError says what there is, and where tensors are."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(say("no_column", key=key, there=", ".join(self) or "nothing"))


@dataclass
class DataProtoItem:
    """Holds one row of a DataProto; `batch` is None where that has no tensors."""

    batch: TensorDict = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    """Holds a batch of rows; see the module's docstring for its parts and `FIELDS` for what they hold.

    `batch` is None where there are no tensors.
    """

    batch: TensorDict = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.non_tensor_batch, self.meta_info = Columns(self.non_tensor_batch), dict(self.meta_info)
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
        """Takes tensors that agree in their first `num_batch_dims` sizes, and arrays or sequences of as many rows.

        Raises: RuntimeError, of tensordict, where sizes differ.
        """
        arrays = {
            k: v if isinstance(v, np.ndarray) else object_array(v)
            for k, v in (non_tensors or {}).items()
        }
        batch = None
        if tensors:
            batch = Tensors(
                dict(tensors), batch_size=next(iter(tensors.values())).shape[:num_batch_dims]
            )
        return cls(batch, arrays, meta_info or {})

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Tensor | np.ndarray], meta_info: MetaInfo = None
    ) -> DataProto:
        """Sorts tensors from arrays for `from_dict`; takes what a DataLoader with the dataset's `collate_fn` yields."""
        tensors = {key: value for key, value in data.items() if isinstance(value, Tensor)}
        arrays = {key: value for key, value in data.items() if not isinstance(value, Tensor)}
        return cls.from_dict(tensors, arrays, meta_info)

    def __getstate__(self) -> dict[str, Any]:
        """Gives tensors as numpy bytes, without padding: a view pickles its own rows only, and Ray copies them once."""
        tensors = {key: to_bytes(tensor) for key, tensor in self._tensors().items()}
        size = None if self.batch is None else tuple(self.batch.batch_size)
        return {
            "size": size,
            "tensors": tensors,
            "non_tensors": self.non_tensor_batch,
            "meta_info": self.meta_info,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the tensors on the CPU, where they may be written to."""
        tensors = {key: from_bytes(*packed) for key, packed in state["tensors"].items()}
        self.batch = None if state["size"] is None else Tensors(tensors, batch_size=state["size"])
        self.non_tensor_batch, self.meta_info = state["non_tensors"], state["meta_info"]

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProto:
        batch = None if self.batch is None else self.batch.clone()
        return DataProto(
            batch, copy.deepcopy(self.non_tensor_batch, memo), copy.deepcopy(self.meta_info, memo)
        )

    # --- Looking ---

    def __len__(self) -> int:
        if self.batch is not None and self.batch.batch_size:
            return self.batch.batch_size[0]
        return next((len(array) for array in self.non_tensor_batch.values()), 0)

    def __getitem__(self, item: int | np.integer | slice | RowIndex) -> Any:
        """Gives a DataProtoItem for an int, a DataProto for a slice (as a view), list, array or mask."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, int | np.integer):
            return DataProtoItem(*self._at(int(item)))
        return self.select_idxs(item)

    def check_consistency(self) -> None:
        """Raises ValueError unless every tensor and array has the same number of rows."""
        sizes = {key: tuple(array.shape[:1]) for key, array in self.non_tensor_batch.items()}
        if any(size != (len(self),) for size in sizes.values()):
            raise ValueError(
                f"every field needs {len(self)} rows, as the first one has; non_tensor_batch has {sizes}"
            )

    def require(self, *fields: str, by: str) -> None:
        """Raises KeyError naming the first field that is missing and the step that should have written it."""
        present = self._tensors().keys() | self.non_tensor_batch.keys()
        for name in (name for name in fields if name not in present):
            known = FIELDS.get(name)
            origin = (
                f"{known.shape} {known.dtype}, written by {known.writer}"
                if known
                else "not a field of FIELDS"
            )
            raise KeyError(
                f"{by} needs {name!r} ({origin}); the batch has {', '.join(sorted(present)) or 'nothing'}"
            )

    # --- Columns ---

    def select(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Takes the named fields; None means all of that part, [] none of it. Tensors are shared."""
        tensors = pick(self._tensors(), batch_keys, "batch")
        arrays = pick(self.non_tensor_batch, non_tensor_batch_keys, "non_tensor_batch")
        meta_info = pick(self.meta_info, meta_info_keys, "meta_info")
        batch = None if self.batch is None else Tensors(tensors, batch_size=self.batch.batch_size)
        selected = DataProto(batch, arrays, meta_info)
        return copy.deepcopy(selected) if deepcopy else selected

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
        for mine, moved in (
            (self.non_tensor_batch, popped.non_tensor_batch),
            (self.meta_info, popped.meta_info),
        ):
            for key in moved:
                del mine[key]
        return popped

    def union(self, other: DataProto) -> DataProto:
        """Adds the other's fields to this one and returns self; ValueError where a shared field differs."""
        batches = [batch for batch in (self.batch, other.batch) if batch is not None]
        batch = reduce(union_tensor_dict, batches) if batches else None
        arrays = union_dicts(self.non_tensor_batch, other.non_tensor_batch, "non_tensor_batch")
        joined = DataProto(batch, arrays, union_dicts(self.meta_info, other.meta_info, "meta_info"))
        self.batch, self.non_tensor_batch, self.meta_info = (
            joined.batch,
            joined.non_tensor_batch,
            joined.meta_info,
        )
        return self

    # --- Rows ---

    def select_idxs(self, idxs: RowIndex) -> DataProto:
        """Copies the rows at these positions, which may repeat; or those where a boolean mask is true."""
        index = torch.as_tensor(idxs).cpu()
        return DataProto(*self._at(index if index.numel() else index.long()))

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
        return None if self.batch is None else self.batch[place], arrays, dict(self.meta_info)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Repeats every row `repeat_times` times: 0 0 1 1 when interleaved, else 0 1 0 1."""
        rows = torch.arange(len(self))
        return self.select_idxs(
            rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times)
        )

    def split(self, split_size: int) -> list[DataProto]:
        """Cuts views of `split_size` rows each; the last may be shorter."""
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def chunk(self, chunks: int) -> list[DataProto]:
        """Cuts `chunks` views of equal size; ValueError if the rows do not divide."""
        if chunks < 1 or len(self) % chunks:
            raise ValueError(say("uneven_chunks", rows=len(self), chunks=chunks))
        size = len(self) // chunks
        return [self.slice(i * size, (i + 1) * size) for i in range(chunks)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Joins the rows of all, in order. Every part needs the same fields.

        meta_info must agree, except `metrics` (name -> number or list), whose values are gathered into lists.
        """
        if not data:
            raise ValueError("DataProto.concat needs at least one DataProto; given an empty list")
        fields = [sorted(part._tensors()) + sorted(part.non_tensor_batch) for part in data]
        for position, names in enumerate(fields):
            if difference := set(names) ^ set(fields[0]):
                raise ValueError(
                    f"concat needs the same fields; part {position} and part 0 differ in {difference}"
                )
        batch = None if data[0].batch is None else torch.cat([part.batch for part in data], dim=0)
        arrays = {
            k: np.concatenate([part.non_tensor_batch[k] for part in data])
            for k in data[0].non_tensor_batch
        }
        return DataProto(batch, arrays, merge_meta_info([part.meta_info for part in data]))

    # --- Padding ---

    def pad_with_dummies(self, divisor: int) -> DataProto:
        """Adds dummies until `divisor` divides the rows (`select_or_dummies`); shares what divides."""
        missing = -len(self) % divisor
        return self.select_or_dummies(range(len(self) + missing)) if missing else self.select()

    def select_or_dummies(self, rows: Sequence[int]) -> DataProto:
        """Copies the rows at these positions; one past the last is a dummy: row 0, response_mask 0, uid "dummy".

        Such rows cost a forward pass but enter no loss, group or average; `drop_dummies` takes them out again.
        """
        self.require("response_mask", "uid", by="dummy rows")
        index = np.asarray(rows)
        added = index >= len(self)
        chosen = self.select_idxs(np.where(added, 0, index))
        tensors = chosen._tensors()
        for name, filler in {"response_mask": 0, "turn_ids": -1}.items():
            if name in tensors:
                tensors[name][torch.as_tensor(added)] = filler
        for name in {"uid", "episode_id"} & chosen.non_tensor_batch.keys():
            chosen.non_tensor_batch[name] = np.where(
                added, DUMMY_UID, chosen.non_tensor_batch[name].astype(object)
            )
        return chosen

    def drop_dummies(self) -> DataProto:
        """Copies the rows that `pad_with_dummies` did not add; a real row of empty response stays."""
        self.require("uid", by="drop_dummies")
        return self.select_idxs(self.non_tensor_batch["uid"].astype(object) != DUMMY_UID)

    def _tensors(self) -> dict[str, Tensor]:
        return {} if self.batch is None else dict(self.batch.items())

    # --- What verl's users know besides: converting ---

    @classmethod
    def from_items(cls, data_list: Sequence[Any]) -> DataProto:
        """Stacks rows into a batch: the inverse of indexing by int. meta_info is the first row's."""
        first = data_list[0]
        batch = None if first.batch is None else torch.stack([row.batch for row in data_list])
        arrays = {
            key: object_array([row.non_tensor_batch[key] for row in data_list])
            for key in first.non_tensor_batch
        }
        return cls(batch, arrays, first.meta_info)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict, meta_info: MetaInfo = None, num_batch_dims: int = 1
    ) -> DataProto:
        """Undoes `to_tensordict`; `meta_info` adds to what the TensorDict carries."""
        tensors = {key: value for key, value in tensor_dict.items() if isinstance(value, Tensor)}
        arrays = {
            key: value.tolist()
            for key, value in tensor_dict.items()
            if isinstance(value, NonTensorStack)
        }
        facts = {
            key: value.data
            for key, value in tensor_dict.items()
            if isinstance(value, NonTensorData)
        }
        return cls.from_dict(tensors, arrays, facts | (meta_info or {}), num_batch_dims)

    def to_tensordict(self) -> TensorDict:
        """Makes one TensorDict: arrays as NonTensorStack (one entry per row), meta_info as NonTensorData."""
        stacks = {
            key: NonTensorStack(*array.tolist()) for key, array in self.non_tensor_batch.items()
        }
        facts = {
            key: NonTensorData(value, batch_size=[len(self)])
            for key, value in self.meta_info.items()
        }
        return TensorDict({**self._tensors(), **stacks, **facts}, batch_size=[len(self)])

    def save_to_disk(self, filepath: str | Path) -> None:
        """Writes tensors and JSON, never a pickle: loading runs no code.

        JSON's limits apply to object arrays and meta_info: tuples come back as lists, dict keys as strings, numpy
        values as Python's. What JSON cannot hold raises TypeError naming the field.
        """
        fields = self.non_tensor_batch.items()
        arrays = {
            key: torch.from_numpy(array.copy())
            for key, array in fields
            if array.dtype.kind in "biuf"
        }
        objects = {
            key: _to_json(array, f"non_tensor_batch[{key!r}]")
            for key, array in fields
            if key not in arrays
        }
        facts = {
            key: _to_json(value, f"meta_info[{key!r}]") for key, value in self.meta_info.items()
        }
        # A view would drag its whole storage into the file.
        tensors = (
            None
            if self.batch is None
            else {key: t.detach().clone() for key, t in self._tensors().items()}
        )
        content = {
            "rows": len(self),
            "tensors": tensors,
            "arrays": arrays,
            "objects": objects,
            "meta_info": facts,
        }
        torch.save(content, filepath)

    @classmethod
    def load_from_disk(cls, filepath: str | Path) -> DataProto:
        """Reads what `save_to_disk` wrote, onto the CPU."""
        content = torch.load(filepath, weights_only=True, map_location="cpu")
        tensors = content["tensors"]
        arrays = {key: array.numpy() for key, array in content["arrays"].items()}
        arrays |= {key: object_array(json.loads(text)) for key, text in content["objects"].items()}
        batch = None if tensors is None else Tensors(tensors, batch_size=[content["rows"]])
        return cls(
            batch, arrays, {key: json.loads(text) for key, text in content["meta_info"].items()}
        )

    # --- … looking ---

    def get_data_info(self) -> str:
        """Describes each field on a line: name, shape, dtype and device, or the type of its objects."""
        lines = [
            f"{key}: {tuple(t.shape)} {t.dtype} {t.device}" for key, t in self._tensors().items()
        ]
        for key, array in self.non_tensor_batch.items():
            content = (
                type(array[0]).__name__
                if array.dtype == object and len(array)
                else str(array.dtype)
            )
            lines.append(f"{key}: {array.shape} {content}")
        return "\n".join(
            lines + [f"meta_info {key}: {type(v).__name__}" for key, v in self.meta_info.items()]
        )

    def print_size(self, prefix: str = "") -> None:
        """Prints the size in GiB; objects count as their pointers only."""
        tensors = sum(t.numel() * t.element_size() for t in self._tensors().values()) / 2**30
        arrays = sum(array.nbytes for array in self.non_tensor_batch.values()) / 2**30
        print(
            f"{prefix}{' ' if prefix else ''}{len(self)} rows, tensors {tensors:.3f} GiB, arrays {arrays:.3f} GiB"
        )

    # --- … columns ---

    def rename(
        self,
        old_keys: str | Sequence[str] | None = None,
        new_keys: str | Sequence[str] | None = None,
    ) -> DataProto:
        """Renames tensors in place and returns self; KeyError where a name is not there, or a new one is taken."""
        old, new = (
            [keys] if isinstance(keys, str) else list(keys or []) for keys in (old_keys, new_keys)
        )
        for name, other in list(zip(old, new, strict=True)):
            self.batch.rename_key_(name, other, safe=True)
        return self

    def to(self, device: str | torch.device) -> DataProto:
        """Moves the tensors in place and returns self."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    # --- … rows ---

    def reorder(self, indices: RowIndex) -> None:
        """Puts the rows into this order, in place."""
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def padding(self, padding_size: int, padding_candidate: str = "") -> DataProto:
        """Appends `padding_size` copies of a row in place and returns self: "first", or the last ("last" or "")."""
        row = 0 if padding_candidate == "first" else len(self) - 1
        self.reorder([*range(len(self)), *[row] * padding_size])
        return self

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | Tensor) -> DataProto:
        """Repeats row i `repeat_times[i]` times, in place of its first."""
        times = torch.as_tensor(repeat_times).cpu()
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(times))

    def unfold_column_chunks(
        self, n_split: int, split_keys: Sequence[str] | None = None
    ) -> DataProto:
        """Cuts the second dimension of `split_keys` into n_split rows: (B, n·L, …) -> (B·n, L, …); repeats all others.

        Row b's chunks become rows b·n … b·n + n-1, so pairs stored side by side stay neighbours.
        """
        unfolded = self.repeat(n_split)
        for key, value in pick(
            self._tensors() | self.non_tensor_batch, list(split_keys or []), "DataProto"
        ).items():
            part = unfolded.batch if isinstance(value, Tensor) else unfolded.non_tensor_batch
            part[key] = value.reshape(
                value.shape[0] * n_split, value.shape[1] // n_split, *value.shape[2:]
            )
        return unfolded

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict | None = None,
    ) -> Iterator[DataProto]:
        """Yields mini-batches of `mini_batch_size` rows, `epochs` times over, in a new order each where asked to.

        Args:
            seed: of the orders, which torch's global generator draws where it is None.
            dataloader_kwargs: `{"shuffle": True}` asks for random orders; nothing else is read.
        Raises: ValueError, before the first mini-batch, for a size that does not divide the rows.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ValueError(
                f"mini_batch_size={mini_batch_size} must divide the batch's {len(self)} rows"
            )
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        shuffle = (dataloader_kwargs or {}).get("shuffle", False)
        order = partial(torch.randperm, generator=generator) if shuffle else torch.arange
        return (
            self.select_idxs(rows)
            for _ in range(epochs)
            for rows in order(len(self)).split(mini_batch_size)
        )


collate_fn = DataProto.from_items


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
        return DataProtoFuture(DataProto.concat, futures, **kwargs)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Makes one future per chunk; nothing is computed before `get`."""
        return [
            replace(self, parts=(*self.parts, (chunks, position))) for position in range(chunks)
        ]

    def get(self) -> Any:
        """Waits for every future, joins their values, and takes this future's chunk."""
        data = self.collect_fn([self.resolve(future) for future in self.futures])
        for chunks, position in self.parts:
            data = data.chunk(chunks)[position]
        return data


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Appends rows from the start until `size_divisor` divides the rows; returns also how many were added."""
    pad_size = -len(data) % size_divisor
    return data.select_idxs(
        torch.arange(len(data) + pad_size) % len(data)
    ) if pad_size else data, pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Takes off the last `pad_size` rows."""
    return data.slice(0, len(data) - pad_size) if pad_size else data


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Joins two TensorDicts; ValueError where a shared tensor differs, RuntimeError where sizes do."""
    merged = union_dicts(dict(tensor_dict1.items()), dict(tensor_dict2.items()), "batch")
    return Tensors(merged, batch_size=tensor_dict1.batch_size)


def _to_json(value: Any, where: str) -> str:
    """Writes JSON text, numpy values as Python's; TypeError names the field `where`."""

    def plain(item: Any) -> Any:
        if isinstance(item, np.ndarray | np.generic):
            return item.tolist()
        raise TypeError(say("no_json_value", where=where, kind=type(item).__name__))

    return json.dumps(value, default=plain)
