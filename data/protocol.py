"""DataProto: the one container in which a batch travels between driver, workers and the user's code.

It owns three parts with the same rows: `batch` (tensors), `non_tensor_batch` (numpy arrays, mostly of objects) and
`meta_info` (facts about the whole batch). Invariant: every tensor and array has `len(self)` rows, and no two DataProtos
share a `meta_info`, so that changing one never changes another; tensors may be shared as views, and are not written to.

A batch of two rows, P = 3 prompt and R = 5 response positions; row 0 has two turns A0, A1 around an answer E0:

    prompts        [. p p]   [p p p]            padded on the left
    responses      [a0 a0 e0 a1 .]   [a0 a0 a0 . .]   padded on the right
    response_mask  [1  1  0  1  0]   [1  1  1  0 0]   1 on what the policy sampled
    turn_ids       [0  0 -1  1 -1]   [0  0  0 -1 -1]

`FIELDS` lists everything that flows, with its writer.
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from data.containers import from_bytes, merge_meta_info, object_array, pick, to_bytes, to_json, union_dicts

DUMMY_UID = "dummy"

RowIndex: TypeAlias = Sequence[int] | Sequence[bool] | np.ndarray | Tensor


class Field(NamedTuple):
    """What one field holds; B = rows, P = prompt length, R = response length, in tokens."""

    shape: str
    dtype: str
    writer: str
    meaning: str


FIELDS: dict[str, Field] = {
    "input_ids": Field("(B,P+R)", "int64", "generate_sequences", "prompt and response; (B,P) out of the dataset"),
    "attention_mask": Field("(B,P+R)", "int64", "generate_sequences", "1 on real tokens, sampled or not"),
    "position_ids": Field("(B,P+R)", "int64", "generate_sequences", "0 for the first real token, then counting"),
    "prompts": Field("(B,P)", "int64", "generate_sequences", "padded on the left"),
    "responses": Field("(B,R)", "int64", "generate_sequences", "all that follows the prompt, padded on the right"),
    "response_mask": Field("(B,R)", "int64", "generate_sequences", "1 on tokens that the policy sampled"),
    "rollout_log_probs": Field("(B,R)", "float32", "generate_sequences", "the engine's log-probs of sampled tokens"),
    "turn_ids": Field("(B,R)", "int64", "generate_sequences", "turn of each sampled token, -1 elsewhere"),
    "token_level_scores": Field("(B,R)", "float32", "compute_reward", "rewards as given, before any KL term"),
    "token_level_rewards": Field("(B,R)", "float32", "apply_kl_penalty", "scores less the KL term, if there is one"),
    "old_log_probs": Field("(B,R)", "float32", "compute_log_prob", "the actor's log-probs before this step's update"),
    "ref_log_prob": Field("(B,R)", "float32", "compute_ref_log_prob", "the reference policy's log-probs"),
    "values": Field("(B,R)", "float32", "compute_values", "the critic's values"),
    "advantages": Field("(B,R)", "float32", "compute_advantage", "zero outside response_mask"),
    "returns": Field("(B,R)", "float32", "compute_advantage", "the critic's targets, zero outside response_mask"),
    "uid": Field("(B,)", "object: str", "RayPPOTrainer.train_step", "prompt group: equal for a prompt's n samples"),
    "episode_id": Field("(B,)", "object: str", "RayPPOTrainer.train_step", "several rows may belong to one episode"),
    "group_index": Field(
        "(B,)", "int64", "RayPPOTrainer.train_step", "number of the prompt in the step; seeds sampling"
    ),
    "sample_index": Field("(B,)", "int64", "RayPPOTrainer.train_step", "number of the sample in its group; seeds it"),
    "ending": Field("(B,)", "object: str", "generate_sequences", "stop or length: how the episode ended"),
    "raw_prompt_ids": Field("(B,)", "object: list[int]", "the dataset", "the prompt's ids without padding"),
    "data_source": Field("(B,)", "object: str", "the dataset", "chooses the scoring function"),
    "reward_model": Field("(B,)", "object: dict", "the dataset", "holds ground_truth"),
    "extra_info": Field("(B,)", "object: dict", "the dataset", "anything else that a reward function wants"),
}


@dataclass
class DataProtoItem:
    """One row of a DataProto."""

    batch: TensorDict = None  # None: a batch without tensors
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    """A batch of rows; see the module's docstring for its parts and `FIELDS` for what they hold."""

    batch: TensorDict = None  # None: a batch without tensors
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
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> "DataProto":
        """Tensors that agree in their first `num_batch_dims` sizes, and arrays or sequences of as many rows."""
        arrays = {k: v if isinstance(v, np.ndarray) else object_array(v) for k, v in (non_tensors or {}).items()}
        batch = None
        if tensors:
            shapes = {key: tuple(value.shape[:num_batch_dims]) for key, value in tensors.items()}
            if len(set(shapes.values())) > 1:
                raise ValueError(f"all tensors need the same first {num_batch_dims} sizes; given {shapes}")
            batch = TensorDict(dict(tensors), batch_size=next(iter(shapes.values())))
        return cls(batch, arrays, meta_info or {})

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Tensor | np.ndarray], meta_info: dict[str, Any] | None = None
    ) -> "DataProto":
        """Like `from_dict`, sorting tensors from arrays: what a DataLoader with our `collate_fn` yields."""
        if wrong := {k: type(v).__name__ for k, v in data.items() if not isinstance(v, Tensor | np.ndarray)}:
            raise ValueError(f"values must be torch.Tensor or numpy.ndarray; given {wrong}")
        tensors = {key: value for key, value in data.items() if isinstance(value, Tensor)}
        arrays = {key: value for key, value in data.items() if isinstance(value, np.ndarray)}
        return cls.from_dict(tensors, arrays, meta_info)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict, meta_info: dict[str, Any] | None = None, num_batch_dims: int = 1
    ) -> "DataProto":
        """The inverse of `to_tensordict`; `meta_info` adds to what the TensorDict carries."""
        values = dict(tensor_dict.items())
        return cls.from_dict(
            {key: value for key, value in values.items() if isinstance(value, Tensor)},
            {key: value.tolist() for key, value in values.items() if isinstance(value, NonTensorStack)},
            {key: value.data for key, value in values.items() if isinstance(value, NonTensorData)} | (meta_info or {}),
            num_batch_dims,
        )

    def to_tensordict(self) -> TensorDict:
        """One TensorDict: arrays as NonTensorStack (one entry per row), meta_info as NonTensorData."""
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
            "objects": {key: to_json(array, f"non_tensor_batch[{key!r}]") for key, array in objects.items()},
            "meta_info": {key: to_json(value, f"meta_info[{key!r}]") for key, value in self.meta_info.items()},
        }
        torch.save(content, filepath)

    @staticmethod
    def load_from_disk(filepath: str | Path) -> "DataProto":
        """Reads what `save_to_disk` wrote, onto the CPU."""
        content = torch.load(filepath, weights_only=True, map_location="cpu")
        tensors = content["tensors"]
        arrays = {key: array.numpy() for key, array in content["arrays"].items()}
        arrays |= {key: object_array(json.loads(text)) for key, text in content["objects"].items()}
        return DataProto(
            None if tensors is None else TensorDict(tensors, batch_size=[content["rows"]]),
            arrays,
            {key: json.loads(text) for key, text in content["meta_info"].items()},
        )

    def __getstate__(self) -> dict[str, Any]:
        """Tensors pickle as numpy bytes: a view pickles its own rows only, and Ray copies them once."""
        tensors = {key: to_bytes(tensor) for key, tensor in self._tensors().items()}
        size = None if self.batch is None else tuple(self.batch.batch_size)
        return {"size": size, "tensors": tensors, "non_tensors": self.non_tensor_batch, "meta_info": self.meta_info}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickled tensors live on the CPU and may be written to."""
        tensors = {key: from_bytes(*packed) for key, packed in state["tensors"].items()}
        self.batch = None if state["size"] is None else TensorDict(tensors, batch_size=state["size"])
        self.non_tensor_batch, self.meta_info = state["non_tensors"], state["meta_info"]

    def __deepcopy__(self, memo: dict[int, Any]) -> "DataProto":
        batch = None if self.batch is None else self.batch.clone()
        return DataProto(batch, copy.deepcopy(self.non_tensor_batch, memo), copy.deepcopy(self.meta_info, memo))

    # --- Looking ---

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        return next((len(array) for array in self.non_tensor_batch.values()), 0)

    def __getitem__(self, item: int | np.integer | slice | RowIndex) -> Any:
        """An int gives a DataProtoItem; a slice (as a view), list, array or mask gives a DataProto."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, int | np.integer):
            if not -len(self) <= item < len(self):
                raise IndexError(f"row {item} of a DataProto with {len(self)} rows")
            row = int(item)
            arrays = {key: array[row] for key, array in self.non_tensor_batch.items()}
            return DataProtoItem(None if self.batch is None else self.batch[row], arrays, dict(self.meta_info))
        return self.select_idxs(item)

    def check_consistency(self) -> None:
        """ValueError unless every tensor and array has the same number of rows."""
        wrong = {k: type(v).__name__ for k, v in self.non_tensor_batch.items() if not isinstance(v, np.ndarray)}
        if wrong:
            raise ValueError(f"non_tensor_batch holds numpy arrays; given {wrong}. DataProto.from_dict converts lists")
        sizes = {key: tuple(array.shape[:1]) for key, array in self.non_tensor_batch.items()}
        if any(size != (len(self),) for size in sizes.values()):
            raise ValueError(f"every field needs {len(self)} rows, as the first one has; non_tensor_batch has {sizes}")

    def require(self, *fields: str, by: str) -> None:
        """KeyError naming the first field that is missing and the step that should have written it."""
        present = self._tensors().keys() | self.non_tensor_batch.keys()
        for name in fields:
            if name in present:
                continue
            known = FIELDS.get(name)
            origin = f"{known.shape} {known.dtype}, written by {known.writer}" if known else "not a field of FIELDS"
            raise KeyError(f"{by} needs {name!r} ({origin}); the batch has {', '.join(sorted(present)) or 'nothing'}")

    def get_data_info(self) -> str:
        """One line per field: name, shape, dtype and device, or the type of its objects."""
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

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> "DataProto":
        """A DataProto of the named fields; None means all of that part, [] none of it. Tensors are shared."""
        tensors = pick(self._tensors(), batch_keys, "batch")
        arrays = pick(self.non_tensor_batch, non_tensor_batch_keys, "non_tensor_batch")
        meta_info = pick(self.meta_info, meta_info_keys, "meta_info")
        batch = None if self.batch is None else TensorDict(tensors, batch_size=self.batch.batch_size)
        selected = DataProto(batch, arrays, meta_info)
        return copy.deepcopy(selected) if deepcopy else selected

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
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

    def rename(
        self, old_keys: str | Sequence[str] | None = None, new_keys: str | Sequence[str] | None = None
    ) -> "DataProto":
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

    def to(self, device: str | torch.device) -> "DataProto":
        """Moves the tensors in place and returns self."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    # --- Rows ---

    def select_idxs(self, idxs: RowIndex) -> "DataProto":
        """The rows at these positions (copied), which may repeat; or those where a boolean mask is true."""
        index = torch.as_tensor(idxs).cpu()
        if index.dtype == torch.bool:
            if index.shape != (len(self),):
                raise ValueError(f"a mask of shape {tuple(index.shape)} cannot choose among {len(self)} rows")
            index = index.nonzero().squeeze(-1)
        elif index.numel() == 0:
            index = index.long()
        rows = index.numpy()
        arrays = {key: array[rows] for key, array in self.non_tensor_batch.items()}
        return DataProto(None if self.batch is None else self.batch[index], arrays, self.meta_info)

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> "DataProto":
        """Rows start to end as a view: no tensor is copied."""
        rows = slice(start, end, step)
        arrays = {key: array[rows] for key, array in self.non_tensor_batch.items()}
        return DataProto(None if self.batch is None else self.batch[rows], arrays, self.meta_info)

    def reorder(self, indices: RowIndex) -> None:
        """Puts the rows into this order, in place."""
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Every row `repeat_times` times: 0 0 1 1 when interleaved, else 0 1 0 1."""
        rows = torch.arange(len(self))
        return self.select_idxs(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | Tensor) -> "DataProto":
        """Row i `repeat_times[i]` times, in place of its first."""
        times = torch.as_tensor(repeat_times).cpu()
        if times.shape != (len(self),):
            raise ValueError(f"repeat_times needs one count per row, {len(self)}; its shape is {tuple(times.shape)}")
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(times))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> "DataProto":
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

    def split(self, split_size: int) -> "list[DataProto]":
        """Views of `split_size` rows each; the last may be shorter."""
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def chunk(self, chunks: int) -> "list[DataProto]":
        """`chunks` views of equal size; ValueError where the rows do not divide."""
        if chunks < 1 or len(self) % chunks:
            raise ValueError(
                f"{len(self)} rows do not divide into {chunks} equal chunks; "
                "pad with pad_dataproto_to_divisor or DataProto.pad_with_dummies first"
            )
        size = len(self) // chunks
        return [self.slice(i * size, (i + 1) * size) for i in range(chunks)]

    @staticmethod
    def concat(data: "Sequence[DataProto]") -> "DataProto":
        """Rows of all, in order. Every part needs the same fields.

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

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> "Iterator[DataProto]":
        """Mini-batches of `mini_batch_size` rows, `epochs` times over; `dataloader_kwargs={"shuffle": True}` shuffles.

        Each epoch has its own order, drawn from `seed`, or from torch's global generator where it is None.
        """
        options = {"shuffle": False, **(dataloader_kwargs or {})}
        if options.keys() != {"shuffle"}:
            raise ValueError(f"dataloader_kwargs takes 'shuffle' only; given {dataloader_kwargs}")
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ValueError(f"mini_batch_size={mini_batch_size} must divide the batch's {len(self)} rows")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return self._mini_batches(mini_batch_size, epochs, options["shuffle"], generator)

    def _mini_batches(
        self, size: int, epochs: int, shuffle: bool, generator: torch.Generator | None
    ) -> "Iterator[DataProto]":
        for _ in range(epochs):
            if shuffle:
                for rows in torch.randperm(len(self), generator=generator).split(size):
                    yield self.select_idxs(rows)
            else:
                yield from self.split(size)

    # --- Padding ---

    def padding(self, padding_size: int, padding_candidate: str = "") -> "DataProto":
        """Appends `padding_size` copies of a row in place and returns self: "first", or the last ("last" or "")."""
        if padding_candidate not in ("", "first", "last"):
            raise ValueError(f"padding_candidate={padding_candidate!r} is unknown; allowed: 'first', 'last'")
        rows = torch.arange(len(self) + padding_size)
        rows[len(self) :] = 0 if padding_candidate == "first" else len(self) - 1
        self.reorder(rows)
        return self

    def pad_with_dummies(self, divisor: int) -> "DataProto":
        """A copy whose rows divide by `divisor`: row 0 again, with response_mask 0 and uid "dummy".

        Such rows cost a forward pass but enter no loss, group or average; `drop_dummies` takes them out again.
        """
        self.require("response_mask", "uid", by="pad_with_dummies")
        if not len(self):
            raise ValueError("pad_with_dummies copies row 0, and this DataProto has no rows")
        padded = self.select_idxs(list(range(len(self))) + [0] * (-len(self) % divisor))
        tensors = padded._tensors()
        for name, filler in {"response_mask": 0, "turn_ids": -1}.items():
            if name in tensors:
                tensors[name][len(self) :] = filler
        for name in {"uid", "episode_id"} & padded.non_tensor_batch.keys():
            padded.non_tensor_batch[name] = padded.non_tensor_batch[name].astype(object)
            padded.non_tensor_batch[name][len(self) :] = DUMMY_UID
        return padded

    def drop_dummies(self) -> "DataProto":
        """The rows that `pad_with_dummies` did not add; a real row of empty response stays."""
        self.require("uid", by="drop_dummies")
        return self.select_idxs(self.non_tensor_batch["uid"].astype(object) != DUMMY_UID)

    def _tensors(self) -> dict[str, Tensor]:
        return {} if self.batch is None else dict(self.batch.items())


@dataclass
class DataProtoFuture:
    """A DataProto that workers are still computing, to be passed on without waiting for it.

    `resolve` turns one future into its value (`ray.get` for Ray's; by default `future.result()`), `collect_fn` joins
    the values, and `parts` holds the chunks taken since, as (number of chunks, position).
    """

    collect_fn: Callable[[list[Any]], DataProto]
    futures: list[Any]
    resolve: Callable[[Any], Any] = methodcaller("result")
    parts: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def concat(futures: list[Any], **kwargs: Any) -> "DataProtoFuture":
        """A future of the futures' values, concatenated."""
        return DataProtoFuture(DataProto.concat, futures, **kwargs)

    def chunk(self, chunks: int) -> "list[DataProtoFuture]":
        """One future per chunk; nothing is computed before `get`."""
        return [replace(self, parts=(*self.parts, (chunks, position))) for position in range(chunks)]

    def get(self) -> DataProto:
        """Waits for every future, joins their values, and takes this future's chunk."""
        data = self.collect_fn([self.resolve(future) for future in self.futures])
        for chunks, position in self.parts:
            data = data.chunk(chunks)[position]
        return data


def collate_fn(data_list: Sequence[DataProtoItem]) -> DataProto:
    """Stacks rows into a batch: the inverse of indexing by int. meta_info is the first row's."""
    first = data_list[0]
    batch = None if first.batch is None else torch.stack([item.batch for item in data_list])
    arrays = {key: object_array([item.non_tensor_batch[key] for item in data_list]) for key in first.non_tensor_batch}
    return DataProto(batch, arrays, first.meta_info)


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Appends rows from the start until `size_divisor` divides the rows; returns also how many were added."""
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data, 0
    return data.select_idxs(torch.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Takes off the last `pad_size` rows."""
    return data.slice(0, len(data) - pad_size) if pad_size else data


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """A TensorDict of both; ValueError where the sizes or a shared tensor differ."""
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        sizes = f"{tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)}"
        raise ValueError(f"union needs the same batch size; given {sizes}")
    merged = union_dicts(dict(tensor_dict1.items()), dict(tensor_dict2.items()), "batch")
    return TensorDict(merged, batch_size=tensor_dict1.batch_size)
