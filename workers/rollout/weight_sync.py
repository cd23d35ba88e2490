"""From the trainer's parameters to a rollout engine's: what is sent, under which names, and the check before that.

Engines fail silently or fatally on a wrong stream of weights: a missing tensor keeps its old values, part of a fused
matrix corrupts it, a wrong shape kills the engine. Invariant: names and shapes are compared with a manifest before the
first tensor moves.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from workers.ranks.distributed import full_tensor


def weight_manifest(module: nn.Module) -> dict[str, torch.Size]:
    """Lists names and shapes of everything `iter_weights` yields, tied copies included."""
    return {name: tensor.shape for name, tensor in module.state_dict().items()}


def iter_weights(module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, whole tensor) one by one, cast to `dtype`: never a second full copy of the model on a rank.

    A tied `lm_head.weight` is yielded as well: vLLM's CPU backend keeps a packed copy of it, which would go stale.
    """
    for name, tensor in module.state_dict().items():
        yield name, full_tensor(tensor.detach().to(dtype))


def expected_manifest(model_config: PretrainedConfig) -> dict[str, torch.Size]:
    """Makes the manifest of a model of this configuration, which is built without memory."""
    with torch.device("meta"):
        return weight_manifest(AutoModelForCausalLM.from_config(model_config))


def check_manifest(sent: dict[str, torch.Size], expected: dict[str, torch.Size]) -> None:
    """Raises ValueError that names every tensor that is missing, unknown or of another shape."""
    problems = [f"missing: {name} {tuple(expected[name])}" for name in expected.keys() - sent.keys()]
    problems += [f"unknown: {name} {tuple(sent[name])}" for name in sent.keys() - expected.keys()]
    problems += [
        f"shape: {name} is {tuple(sent[name])}, the engine has {tuple(expected[name])}"
        for name in expected.keys() & sent.keys()
        if sent[name] != expected[name]
    ]
    if problems:
        listed = "\n  ".join(sorted(problems))
        raise ValueError(f"weights do not fit the rollout engine; nothing was sent:\n  {listed}")
