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

A DataProto is pickled without the padding of its rows, and comes back bit for bit. Of verl's names, those that no run
calls stand in `data.verl_names` and are offered here.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from tensordict import TensorDict
from torch import Tensor

from data.containers import Keys, RowIndex, from_bytes, merge_meta_info, object_array, pick, to_bytes, union_dicts
from data.verl_names import *  # noqa: F403  (offered here)
from data.verl_names import AUTO_PADDING, MetaInfo, VerlMethods

DUMMY_UID = "dummy"


class Field(NamedTuple):
    """Says what one field holds; B = rows, P = prompt length, R = response length, in tokens."""

    shape: str
    dtype: str
    writer: str
    meaning: str


TABLE: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("fields.yaml").read_text(encoding="utf-8"))
FIELDS = {name: Field(*entry) for name, entry in TABLE.items()}


@dataclass
class DataProtoItem:
    """Holds one row of a DataProto; `batch` is None where that has no tensors."""

    batch: TensorDict = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto(VerlMethods):
    """Holds a batch of rows; see the module's docstring for its parts and `FIELDS` for what they hold.

    `batch` is None where there are no tensors.
    """

    batch: TensorDict = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.non_tensor_batch, self.meta_info = dict(self.non_tensor_batch), dict(self.meta_info)
        self.check_consistency()

    # --- Building and converting ---

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, np.ndarray | Sequence[Any]] | None = None,
        meta_info: MetaInfo = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> "DataProto":
        """Takes tensors that agree in their first `num_batch_dims` sizes, and arrays or sequences of as many rows.

        With `auto_padding`, which meta_info keeps, `chunk` may give the last chunks a row less.
        """
        arrays = {k: v if isinstance(v, np.ndarray) else object_array(v) for k, v in (non_tensors or {}).items()}
        batch = None
        if tensors:
            shapes = {key: tuple(value.shape[:num_batch_dims]) for key, value in tensors.items()}
            if len(set(shapes.values())) > 1:
                raise ValueError(f"all tensors need the same first {num_batch_dims} sizes; given {shapes}")
            batch = TensorDict(dict(tensors), batch_size=next(iter(shapes.values())))
        return cls(batch, arrays, {**(meta_info or {}), **({AUTO_PADDING: True} if auto_padding else {})})

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Tensor | np.ndarray], meta_info: MetaInfo = None, auto_padding: bool = False
    ) -> "DataProto":
        """Sorts tensors from arrays for `from_dict`; takes what a DataLoader with the dataset's `collate_fn` yields."""
        if wrong := {k: type(v).__name__ for k, v in data.items() if not isinstance(v, Tensor | np.ndarray)}:
            raise ValueError(f"values must be torch.Tensor or numpy.ndarray; given {wrong}")
        tensors = {key: value for key, value in data.items() if isinstance(value, Tensor)}
        arrays = {key: value for key, value in data.items() if isinstance(value, np.ndarray)}
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    def __getstate__(self) -> dict[str, Any]:
        """Gives tensors as numpy bytes, without padding: a view pickles its own rows only, and Ray copies them once."""
        tensors = {key: to_bytes(tensor) for key, tensor in self._tensors().items()}
        size = None if self.batch is None else tuple(self.batch.batch_size)
        return {"size": size, "tensors": tensors, "non_tensors": self.non_tensor_batch, "meta_info": self.meta_info}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the tensors on the CPU, where they may be written to."""
        tensors = {key: from_bytes(*packed) for key, packed in state["tensors"].items()}
        self.batch = None if state["size"] is None else TensorDict(tensors, batch_size=state["size"])
        self.non_tensor_batch, self.meta_info = state["non_tensors"], state["meta_info"]

    def __deepcopy__(self, memo: dict[int, Any]) -> "DataProto":
        batch = None if self.batch is None else self.batch.clone()
        return DataProto(batch, copy.deepcopy(self.non_tensor_batch, memo), copy.deepcopy(self.meta_info, memo))

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
            if not -len(self) <= item < len(self):
                raise IndexError(f"row {item} of a DataProto with {len(self)} rows")
            return DataProtoItem(*self._at(int(item)))
        return self.select_idxs(item)

    def check_consistency(self) -> None:
        """Raises ValueError unless every tensor and array has the same number of rows."""
        wrong = {k: type(v).__name__ for k, v in self.non_tensor_batch.items() if not isinstance(v, np.ndarray)}
        if wrong:
            raise ValueError(f"non_tensor_batch holds numpy arrays; given {wrong}. DataProto.from_dict converts lists")
        sizes = {key: tuple(array.shape[:1]) for key, array in self.non_tensor_batch.items()}
        if any(size != (len(self),) for size in sizes.values()):
            raise ValueError(f"every field needs {len(self)} rows, as the first one has; non_tensor_batch has {sizes}")

    def require(self, *fields: str, by: str) -> None:
        """Raises KeyError naming the first field that is missing and the step that should have written it."""
        present = self._tensors().keys() | self.non_tensor_batch.keys()
        for name in (name for name in fields if name not in present):
            known = FIELDS.get(name)
            origin = f"{known.shape} {known.dtype}, written by {known.writer}" if known else "not a field of FIELDS"
            raise KeyError(f"{by} needs {name!r} ({origin}); the batch has {', '.join(sorted(present)) or 'nothing'}")

    # --- Columns ---

    def select(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
        deepcopy: bool = False,
    ) -> "DataProto":
        """Takes the named fields; None means all of that part, [] none of it. Tensors are shared."""
        tensors = pick(self._tensors(), batch_keys, "batch")
        arrays = pick(self.non_tensor_batch, non_tensor_batch_keys, "non_tensor_batch")
        meta_info = pick(self.meta_info, meta_info_keys, "meta_info")
        batch = None if self.batch is None else TensorDict(tensors, batch_size=self.batch.batch_size)
        selected = DataProto(batch, arrays, meta_info)
        return copy.deepcopy(selected) if deepcopy else selected

    def pop(
        self, batch_keys: Keys = None, non_tensor_batch_keys: Keys = None, meta_info_keys: Keys = None
    ) -> "DataProto":
        """Moves the named fields out of this DataProto into a new one; None means none."""
        popped = self.select(batch_keys or [], non_tensor_batch_keys or [], meta_info_keys or [])
        if self.batch is not None:
            self.batch = self.batch.exclude(*(batch_keys or []))
        for key in non_tensor_batch_keys or []:
            del self.non_tensor_batch[key]
        for key in meta_info_keys or []:
            del self.meta_info[key]
        return popped

    def union(self, other: "DataProto") -> "DataProto":
        """Adds the other's fields to this one and returns self; ValueError where a shared field differs."""
        if self.batch is not None and other.batch is not None:
            batch = union_tensor_dict(self.batch, other.batch)
        else:
            batch = self.batch if self.batch is not None else other.batch
        arrays = union_dicts(self.non_tensor_batch, other.non_tensor_batch, "non_tensor_batch")
        joined = DataProto(batch, arrays, union_dicts(self.meta_info, other.meta_info, "meta_info"))
        self.batch, self.non_tensor_batch, self.meta_info = joined.batch, joined.non_tensor_batch, joined.meta_info
        return self

    # --- Rows ---

    def select_idxs(self, idxs: RowIndex) -> "DataProto":
        """Copies the rows at these positions, which may repeat; or those where a boolean mask is true."""
        index = torch.as_tensor(idxs).cpu()
        if index.dtype == torch.bool:
            if index.shape != (len(self),):
                raise ValueError(f"a mask of shape {tuple(index.shape)} cannot choose among {len(self)} rows")
            index = index.nonzero().squeeze(-1)
        elif index.numel() == 0:
            index = index.long()
        return DataProto(*self._at(index))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> "DataProto":
        """Takes rows start to end as a view: no tensor is copied."""
        return DataProto(*self._at(slice(start, end, step)))

    def _at(self, place: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Takes from every part what is at a row, a slice or a tensor of positions."""
        # numpy takes a tensor of one entry for a number.
        rows = place.numpy() if isinstance(place, Tensor) else place
        arrays = {key: array[rows] for key, array in self.non_tensor_batch.items()}
        return None if self.batch is None else self.batch[place], arrays, dict(self.meta_info)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Repeats every row `repeat_times` times: 0 0 1 1 when interleaved, else 0 1 0 1."""
        rows = torch.arange(len(self))
        return self.select_idxs(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def split(self, split_size: int) -> "list[DataProto]":
        """Cuts views of `split_size` rows each; the last may be shorter."""
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def chunk(self, chunks: int) -> "list[DataProto]":
        """Cuts `chunks` views of equal size; uneven with `auto_padding`, else ValueError if the rows do not divide."""
        if chunks < 1 or (len(self) % chunks and not self.is_padding_enabled()):
            raise ValueError(
                f"{len(self)} rows do not divide into {chunks} equal chunks; "
                "pad with pad_dataproto_to_divisor or DataProto.pad_with_dummies first"
            )
        ends = [-(-len(self) * i // chunks) for i in range(chunks + 1)]
        return [self.slice(*span) for span in pairwise(ends)]

    @staticmethod
    def concat(data: "Sequence[DataProto]") -> "DataProto":
        """Joins the rows of all, in order. Every part needs the same fields.

        meta_info must agree, except `metrics` (name -> number or list), whose values are gathered into lists.
        """
        if not data:
            raise ValueError("DataProto.concat needs at least one DataProto; given an empty list")
        fields = [sorted(part._tensors()) + sorted(part.non_tensor_batch) for part in data]
        for position, names in enumerate(fields):
            if difference := set(names) ^ set(fields[0]):
                raise ValueError(f"concat needs the same fields; part {position} and part 0 differ in {difference}")
        batch = None if data[0].batch is None else torch.cat([part.batch for part in data], dim=0)
        arrays = {k: np.concatenate([part.non_tensor_batch[k] for part in data]) for k in data[0].non_tensor_batch}
        return DataProto(batch, arrays, merge_meta_info([part.meta_info for part in data]))

    # --- Padding ---

    def pad_with_dummies(self, divisor: int) -> "DataProto":
        """Adds dummies until `divisor` divides the rows (`select_or_dummies`); shares what divides."""
        if len(self) % divisor == 0:
            return self.select()
        return self.select_or_dummies(range(len(self) + -len(self) % divisor))

    def select_or_dummies(self, rows: Sequence[int]) -> "DataProto":
        """Copies the rows at these positions; one past the last is a dummy: row 0, response_mask 0, uid "dummy".

        Such rows cost a forward pass but enter no loss, group or average; `drop_dummies` takes them out again.
        """
        self.require("response_mask", "uid", by="dummy rows")
        if not len(self):
            raise ValueError("a dummy is a copy of row 0, and this DataProto has no rows")
        index = np.asarray(rows)
        added = index >= len(self)
        chosen = self.select_idxs(np.where(added, 0, index))
        tensors = chosen._tensors()
        for name, filler in {"response_mask": 0, "turn_ids": -1}.items():
            if name in tensors:
                tensors[name][torch.as_tensor(added)] = filler
        for name in {"uid", "episode_id"} & chosen.non_tensor_batch.keys():
            chosen.non_tensor_batch[name] = chosen.non_tensor_batch[name].astype(object)
            chosen.non_tensor_batch[name][added] = DUMMY_UID
        return chosen

    def drop_dummies(self) -> "DataProto":
        """Copies the rows that `pad_with_dummies` did not add; a real row of empty response stays."""
        self.require("uid", by="drop_dummies")
        return self.select_idxs(self.non_tensor_batch["uid"].astype(object) != DUMMY_UID)

    def _tensors(self) -> dict[str, Tensor]:
        return {} if self.batch is None else dict(self.batch.items())


collate_fn = DataProto.from_items


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Appends rows from the start until `size_divisor` divides the rows; returns also how many were added."""
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data, 0
    return data.select_idxs(torch.arange(len(data) + pad_size) % len(data)), pad_size


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Joins two TensorDicts; ValueError where the sizes or a shared tensor differ."""
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        sizes = f"{tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)}"
        raise ValueError(f"union needs the same batch size; given {sizes}")
    merged = union_dicts(dict(tensor_dict1.items()), dict(tensor_dict2.items()), "batch")
    return TensorDict(merged, batch_size=tensor_dict1.batch_size)
