"""The two dicts of a batch: their errors say what there is, and where everything else is."""

from typing import Any

from tensordict import TensorDict

from data.array_ops import union_dicts


class Tensors(TensorDict):
    """Makes a TensorDict's KeyError say what there is, and where everything else is."""

    def __getitem__(self, index: Any) -> Any:
        try:
            return super().__getitem__(index)
        except KeyError:
            there = ", ".join(map(str, self.keys())) or "nothing"
            raise KeyError(
                f"the batch has no tensor {index!r}; it has: {there}. What is no tensor, as states "
                f"and texts, is in non_tensor_batch[{index!r}]"
            ) from None


class Columns(dict[str, Any]):
    """Makes a dict's KeyError say what there is, and where tensors are."""

    def __missing__(self, key: str) -> Any:
        there = ", ".join(self) or "nothing"
        raise KeyError(
            f"non_tensor_batch has no {key!r}; it has: {there}. Tensors are in batch[{key!r}]"
        )


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Joins two TensorDicts.

    Raises:
        ValueError: a shared tensor differs.
        RuntimeError: sizes differ.
    """
    merged = union_dicts(dict(tensor_dict1.items()), dict(tensor_dict2.items()), "batch")
    return Tensors(merged, batch_size=tensor_dict1.batch_size)
