"""Makes a model compute in training what it computes when it is read.

What a model does in training alone is random, or changes its weights: dropout, layers that are left
out, noise on what a router reads. Old and new log-probs, or values, would then differ where nothing
has changed. So a model that trains is in evaluation mode too, but for the layers whose states are
made again in the backward pass (gradient checkpointing): transformers asks for their `training`,
which is off as soon as they compute.

    lm                 evaluation
      layer            training, where it is checkpointed; inside of its forward evaluation
        attention      evaluation

Invariant: training changes no number of a forward pass; it does not matter which id pads.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def learn_all_embeddings(model: nn.Module) -> None:
    """Lets every token's embedding learn, the padding token's too.

    transformers gives embeddings the `padding_idx` of their config, whose row then gets no
    gradient. Many models pad with the token that ends their turns, which every row of several turns
    reads.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None


def checkpoint_gradients(model: nn.Module) -> None:
    """Has a transformers model make the states of its layers again in the backward pass."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and _checkpoints(module):
            module._gradient_checkpointing_func = _checkpoint_layer


def set_training(model: nn.Module, training: bool) -> bool:
    """Switches training on or off, as this file's docstring says; in place of `model.train`.

    Code that checkpoints its layers itself asks for its own `training`, not for the layers'.

    Returns: whether a module of the model is checkpointed.
    """
    inside = False
    for child in model.children():
        inside |= set_training(child, training)
    model.training = training and not inside and _checkpoints(model)
    return inside or _checkpoints(model)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Has a model in evaluation mode in the block, and behind it in the modes of before."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _checkpoints(module: nn.Module) -> bool:
    """Checks whether gradient checkpointing was switched on for this very module."""
    return bool(vars(module).get("gradient_checkpointing"))


def _checkpoint_layer(call: partial[Any], *args: Any) -> Any:
    """Runs a layer whose states are made again; `call` is its `__call__`, with its keywords.

    They are in the context variables of the first time, such as the experts that its tokens get
    (router_replay.py).
    """
    layer = call.func.__self__  # type: ignore[attr-defined]
    context = copy_context()
    return checkpoint(context.run, _compute, layer, call, *args, use_reentrant=False)


def _compute(layer: nn.Module, call: Callable[..., Any], *args: Any) -> Any:
    """Runs a layer of a model that trains in evaluation mode."""
    layer.training = False
    try:
        return call(*args)
    finally:
        layer.training = True
