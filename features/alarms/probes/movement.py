"""Which tensors of a model move, and how far: a few of their numbers before and after an update.

A tensor that an update leaves as it was, or that only its weight decay has touched, is not trained,
whatever its gradient's norm says. Invariant: a model is read and never written.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from workers.model.probe import Measured, MiniBatch, TrainedModel, UpdateProbe

# Numbers of a tensor that are compared; of one with more rows, as an embedding, one a row.
SAMPLED = 4096
# Rounding steps of its type that a number must be able to move by, to be expected to.
VISIBLE_STEPS = 16
# Parts that a batch need not reach: experts that nothing is sent to, and towers without an image.
MAY_REST = ("expert", "visual", "vision")
# Tensors that are named.
MOST_NAMED = 3
# The number of a layer in the name of a tensor, and what else a tensor may belong to.
LAYER_NUMBER = re.compile(r"\.(\d+)\.")
PARTS = {"embed": "embedding", "lm_head": "head", "wte": "embedding"}

Numbers = dict[str, Tensor]
# By tensor and name, 0-dim each: 1 where something holds, else 0.
Flags = dict[str, Tensor]


class StillTensors(UpdateProbe):
    """Finds the tensors that an update leaves as they were, or only decays.

    MODEL/still_tensors is their number, and MODEL/still/NAME 1 for the first of them;
    MODEL/optimizer_steps counts the optimiser's steps. MODEL/moved/LAYER is how far a layer has
    moved, as a share of its size.
    """

    def __init__(self) -> None:
        self._model: TrainedModel | None = None
        # What is to train, by the model as it was loaded; of a sharded model this rank's shards.
        self._names: list[str] = []
        self._shards: dict[str, Tensor] = {}
        self._before: Numbers = {}
        self._steps = 0
        self._hook: Any = None

    def loaded(self, model: TrainedModel) -> None:
        """Notes which parameters are to train."""
        self._model = model
        self._names = trained_tensors(model.module)
        self._shards = shards_of(dict(model.module.named_parameters()))

    def begin(self, model: TrainedModel, mini: MiniBatch) -> None:
        """Keeps numbers of the parameters as they are before the update."""
        if mini.number > 0:
            return
        self._let_go()
        self._before = sample_numbers(self._watched(model.module))
        self._steps = 0
        # Whoever has the optimiser make a step counts, not the update alone.
        self._hook = model.optimizer.register_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        self._steps += 1

    def _watched(self, module: nn.Module) -> dict[str, Tensor]:
        """Returns the parameters that are to train, as far as the module still has them.

        Where a forward pass leaves its parameters gathered the module names those; what the
        optimiser moves are the shards.
        """
        parameters = dict(module.named_parameters()) | self._shards
        return {name: parameters[name] for name in self._names if name in parameters}

    def take(self) -> Measured:
        """Compares the parameters with what they were."""
        self._let_go()
        if self._model is None or not self._names:
            return Measured()
        group = self._model.optimizer.param_groups[0]
        tensors = self._watched(self._model.module)
        now = sample_numbers({name: tensors[name] for name in self._before if name in tensors})
        flags = movement_flags(
            now,
            self._before,
            rate=float(group["lr"]),
            decay=float(group.get("weight_decay", 0.0)),
            updates=self._steps,
        )
        strides = {name: stride_of(tensors[name]) for name in now}
        squares = squares_of_layers(now, self._before, strides)
        steps = torch.tensor(float(self._steps))
        self._before = {}
        self._steps = 0
        return Measured(sums=squares, maxima={"optimizer_steps": steps, **flags})

    def _let_go(self) -> None:
        """Counts no steps any more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def metrics_of(self, totals: dict[str, float]) -> dict[str, float]:
        """Names the tensors that could have moved, and did not on any rank."""
        if self._model is None or not totals:
            return {}
        still = []
        for name in self._names:
            if totals.get(f"movable {name}") and not totals[f"moved {name}"]:
                still.append(name)
        model = self._model.name
        metrics = {
            f"{model}/still_tensors": float(len(still)),
            f"{model}/optimizer_steps": totals["optimizer_steps"],
        }
        metrics.update({f"{model}/still/{name}": 1.0 for name in still[:MOST_NAMED]})
        for name, square in totals.items():
            kind, _, layer = name.partition(" ")
            size = totals.get(f"size {layer}", 0.0)
            if kind == "distance" and size > 0:
                metrics[f"{model}/moved/{layer}"] = (square / size) ** 0.5
        return metrics


def shards_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Picks the tensors that are spread over ranks."""
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}


def sample_numbers(tensors: Mapping[str, Tensor]) -> Numbers:
    """Copies about SAMPLED numbers of each tensor, as far as they lie in this rank's part of it.

    They are the same numbers however many ranks share the tensor.
    """
    return {name: _sampled(tensor.detach()) for name, tensor in tensors.items()}


def stride_of(tensor: Tensor) -> int:
    """Returns how many numbers of a tensor, of all ranks, each sampled one stands for."""
    wanted = SAMPLED
    if tensor.dim() == 2:
        wanted = max(wanted, tensor.shape[0])
    return max(tensor.numel() // wanted, 1)


def _sampled(tensor: Tensor) -> Tensor:
    stride = stride_of(tensor)
    start = 0
    if isinstance(tensor, DTensor):
        start = -_numbers_before(tensor) % stride
        tensor = tensor.to_local()
    return tensor.reshape(-1)[start::stride].clone()


def _numbers_before(tensor: DTensor) -> int:
    """Counts the numbers of a tensor in the ranks before this one, which share its rows."""
    mesh = tensor.device_mesh
    rows = tensor.shape[0]
    first_row = 0
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_shard(0):
            rows_each = -(-rows // mesh.size(dimension))
            first_row = min(mesh.get_local_rank(dimension) * rows_each, rows)
    return first_row * (tensor.numel() // max(rows, 1))


def trained_tensors(module: nn.Module) -> list[str]:
    """Names the parameters that are to train, but for those that a batch may leave alone."""
    names = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not any(part in name for part in MAY_REST):
            names.append(name)
    return names


def layers_of(names: Sequence[str]) -> dict[str, str]:
    """Names the layer of each tensor: layer_NN in the order of their numbers, or another part."""
    found = {name: LAYER_NUMBER.search(name) for name in names}
    numbers = [int(match.group(1)) for match in found.values() if match]
    width = len(str(max(numbers, default=0)))
    layers = {}
    for name, match in found.items():
        others = [part for key, part in PARTS.items() if key in name]
        layers[name] = others[0] if others else "rest"
        if match:
            layers[name] = f"layer_{int(match.group(1)):0{width}}"
    return layers


def squares_of_layers(
    now: Numbers, before: Numbers, strides: Mapping[str, int]
) -> dict[str, Tensor]:
    """Sums squares of this rank's numbers by layer, 0-dim float32 on the CPU each.

    Args:
        now, before: what `sample_numbers` gave of them.
        strides: how many numbers each sampled one stands for.
    Returns: "distance LAYER", of their differences; and "size LAYER", of what they were before.
    """
    names: list[str] = []
    squares = []
    for name, layer in layers_of(list(now)).items():
        names += [f"distance {layer}", f"size {layer}"]
        first = before[name].float()
        distance = (now[name].float() - first).square().sum() * strides[name]
        squares += [distance, first.square().sum() * strides[name]]
    sums: dict[str, Tensor] = {}
    for name, square in read_scalars(names, squares):
        sums[name] = sums.get(name, torch.zeros(())) + square
    return sums


def movement_flags(
    now: Numbers, before: Numbers, *, rate: float, decay: float, updates: int
) -> Flags:
    """Compares this rank's part of tensors with what it was before an update.

    Args:
        now, before: what `sample_numbers` gave of them.
        rate: the learning rate; decay: of weights, in one update rate x decay.
        updates: optimiser steps that were made.

    Returns: "moved NAME", other than by decay; and "movable NAME", which is 0 for a tensor whose
        numbers the update could not move, as their type rounds it away.
    """
    kept = (1 - rate * decay) ** updates
    steps = {}
    moved = {}
    for name, own_now in now.items():
        numbers = before[name]
        steps[name] = torch.finfo(numbers.dtype).eps * numbers.abs().float()
        decayed = (own_now.float() - numbers.float() * kept).abs() <= steps[name] * (updates + 1)
        moved[name] = ~(decayed.all() | (own_now == numbers).all())
    reach = reach_of_update(now, before, moved, rate)
    names = []
    flags = []
    for name, step in steps.items():
        names += [f"moved {name}", f"movable {name}"]
        flags.append(moved[name])
        flags.append((step * VISIBLE_STEPS < reach).any())
    return read_flags(names, flags)


def reach_of_update(now: Numbers, before: Numbers, moved: Flags, rate: float) -> float:
    """Returns how far an update moves numbers: by the rate, or less where gradients scale it.

    An optimiser that divides by the gradient's size, as AdamW does, moves numbers by about the
    rate; plain SGD by the rate times the gradient. So it is measured: half of the tensors that
    moved other than by decay have a number that moved further. Where none moved it is the rate.
    """
    ways = []
    for name, own_now in now.items():
        if own_now.numel() > 0:
            way = (own_now.float() - before[name].float()).abs().max()
            ways.append(torch.where(moved[name], way, torch.nan))
    if not ways:
        return rate
    median = torch.stack(ways).nanmedian().item()
    return rate if math.isnan(median) else min(rate, median)


def read_flags(names: Sequence[str], flags: Sequence[Tensor]) -> Flags:
    """Brings flags, 0-dim bool each, to the CPU at once."""
    return dict(read_scalars(names, flags))


def read_scalars(names: Sequence[str], values: Sequence[Tensor]) -> Sequence[tuple[str, Tensor]]:
    """Brings 0-dim values to the CPU at once, as float32 with their names, of which some may be
    equal.
    """
    if not values:
        return []
    return list(zip(names, torch.stack(list(values)).float().cpu().unbind(), strict=True))
