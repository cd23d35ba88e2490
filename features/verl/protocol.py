"""Functions of verl's protocol module that DataProto has as methods, or that pack tensors.

DataProto itself packs its tensors in data/tensor_bytes.py, without the padding of their rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from data import protocol
from data.array_ops import union_dicts
from data.protocol import DataProto

# dtype, shape and bytes of a tensor.
PackedTensor = tuple[str, tuple[int, ...], Any]


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Makes new_batch_size rows of as many old ones each; see `DataProto.fold_batch_dim`."""
    return data.fold_batch_dim(new_batch_size)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Undoes `fold_batch_dim`."""
    return data.unfold_batch_dim(batch_dims)


def union_numpy_dict(
    tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Adds the second's arrays to the first and returns it.

    Raises:
        BatchError: a shared array differs; it is an AssertionError too.
    """
    tensor_dict1.update(union_dicts(tensor_dict1, tensor_dict2, "the arrays"))
    return tensor_dict1


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Gathers the entries of dicts that all have the same keys."""
    if not list_of_dict:
        return {}
    return {key: [entry[key] for entry in list_of_dict] for key in list_of_dict[0]}


def serialize_single_tensor(obj: Tensor) -> PackedTensor:
    """Packs a tensor as (name of its dtype, shape, bytes)."""
    content = obj.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return str(obj.dtype).removeprefix("torch."), tuple(obj.shape), content


def deserialize_single_tensor(arr: PackedTensor) -> Tensor:
    """Undoes `serialize_single_tensor`."""
    dtype, shape, content = arr
    # A copy, which may be written to.
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return flat.view(getattr(torch, dtype)).view(shape)


def serialize_tensordict(
    batch: TensorDict,
) -> tuple[tuple[int, ...], str | None, dict[str, tuple[Any, ...]]]:
    """Packs a TensorDict as (batch size, device or None, name -> packed tensor).

    A nested tensor is packed as (name of its layout, its packed tensors).
    """
    packed: dict[str, tuple[Any, ...]] = {}
    for key, tensor in batch.items():
        if tensor.is_nested:
            layout = str(tensor.layout).removeprefix("torch.")
            packed[key] = (layout, [serialize_single_tensor(part) for part in tensor.unbind()])
        else:
            packed[key] = serialize_single_tensor(tensor)
    device = None if batch.device is None else str(batch.device)
    return tuple(batch.batch_size), device, packed


def deserialize_tensordict(arr: tuple[Any, Any, Mapping[str, Any]]) -> TensorDict:
    """Undoes `serialize_tensordict`."""
    batch_size, device, packed = arr
    tensors = {}
    for key, content in packed.items():
        if len(content) == 2:
            layout, parts = content
            tensors[key] = torch.nested.as_nested_tensor(
                [deserialize_single_tensor(part) for part in parts], layout=getattr(torch, layout)
            )
        else:
            tensors[key] = deserialize_single_tensor(content)
    return TensorDict(tensors, batch_size=batch_size, device=device)


def __getattr__(name: str) -> Any:
    """Returns what data.protocol has."""
    return getattr(protocol, name)
