"""The manifest: names and shapes of the weights that the trainer sends to a rollout engine.

Engines fail silently or fatally on a wrong stream of weights: a missing tensor keeps its old
values, part of a fused matrix corrupts it, a wrong shape kills the engine. Invariant: before the
first tensor moves, the names and shapes that are announced (the manifest) are known to fill the
engine's model; what then comes is what was announced.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from workers.model.lora import base_name, whole_weights

Manifest = dict[str, torch.Size]


def weight_manifest(module: nn.Module) -> Manifest:
    """Lists names and shapes of everything `iter_weights` yields, tied copies included."""
    manifest = {}
    for name, tensor in module.state_dict().items():
        sent_name = base_name(name)
        # An adapter is not sent under a name of its own.
        if sent_name is not None:
            manifest[sent_name] = tensor.shape
    return manifest


def iter_weights(
    module: nn.Module, dtype: torch.dtype, casts: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, whole tensor) one by one, cast to `dtype`.

    A rank so never holds a second full copy of the model. Adapters are merged into what is sent,
    which has the base model's names. A tied `lm_head.weight` is yielded as well: vLLM's CPU backend
    keeps a packed copy of it, which would go stale.

    Args:
        casts: False where an engine casts as it copies (`Engine.casts_weights`): a tensor that is
            whole already then comes as the trainer holds it, and is read once.
    """
    yield from whole_weights(module, module.state_dict(), dtype, casts)


def check_manifest(sent: Manifest, expected: Manifest) -> None:
    """Raises ValueError that names every tensor that is missing or unknown.

    One of another shape is both.
    """
    problems = []
    for name, shape in expected.items() - sent.items():
        problems.append(f"missing: {name} {tuple(shape)}")
    for name, shape in sent.items() - expected.items():
        problems.append(f"unknown: {name} {tuple(shape)}")
    refuse(problems)


def refuse(problems: Iterable[str]) -> None:
    """Raises ValueError that lists the problems of a manifest, if there are any."""
    lines = "\n  ".join(sorted(problems))
    if lines:
        raise ValueError(f"weights do not fit the rollout engine; nothing was sent:\n  {lines}")


def as_announced(
    weights: Iterable[tuple[str, Tensor]], manifest: Manifest
) -> Iterator[tuple[str, Tensor]]:
    """Passes the weights on as long as they are what the manifest announces.

    Raises:
        ValueError: naming the tensor that is not in it, of another shape or sent twice; or those
            that never came.
    """
    awaited = dict(manifest)
    for name, tensor in weights:
        if awaited.pop(name, None) != tensor.shape:
            raise ValueError(
                f"{name} {tuple(tensor.shape)} was not announced, or comes twice; "
                "the rollout engine is of no use now"
            )
        yield name, tensor
    if awaited:
        raise ValueError(f"{', '.join(awaited)} never came; the rollout engine is of no use now")
