"""The memory of a model that trains, or is read, in each phase of a step.

Invariant: of several ranks each has its share of weights, gradients and moments; what FSDP2 gathers
for a while comes on top, as `copies`.
"""

import logging

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from features.memory_plan.forward_pass import peak_of_pass
from features.memory_plan.models import ModelPass, PlannedModel
from features.memory_plan.planned_run import PlannedRun
from features.memory_plan.terms import MemoryTerms, PartMemory, Phase
from training.config import OptimConfig
from workers.model.optimizer import build_optimizer

logger = logging.getLogger(__name__)

# A checkpoint has a parameter in float32, beside its optimiser's state.
SAVED_BYTES = 4
# Weights for an engine, and numbers under autocast, have mostly 16 bits.
CAST_BYTES = 2


class ModelPlan:
    """Plans one model of a rank, phase by phase.

    Attributes:
        num_parameters: of the whole model, in numbers, as those that follow.
        num_trained: those that train.
        num_outer: those that are as wide as the vocabulary, embedding and head, which FSDP2 gathers
            for a whole pass.
        num_per_block: those of a layer, with its part of the last norm.
        weight_bytes, moment_bytes: a rank's share.
    """

    def __init__(self, model: PlannedModel, run: PlannedRun, mode: FakeTensorMode) -> None:
        self.model = model
        self.run = run
        self.mode = mode
        self.parameters: list[nn.Parameter] = list(model.loop.module.parameters())
        self.num_parameters = sum(p.numel() for p in self.parameters)
        self.num_trained = sum(p.numel() for p in self.parameters if p.requires_grad)
        self.num_outer = sum(p.numel() for p in self.parameters if run.vocab_size in p.shape)
        self.num_per_block = (self.num_parameters - self.num_outer) // run.num_layers
        self.weight_bytes = sum(p.nbytes for p in self.parameters) // run.num_ranks
        self.moment_bytes = state_bytes(model, mode) // run.num_ranks

    def plan(self) -> PartMemory:
        """Plans what the model takes at rest, and in the phases that it is used in."""
        phases: dict[Phase, MemoryTerms] = {
            "generation": self.generation(),
            "checkpoint": self.checkpoint(),
        }
        self.store_as_gathered()
        for model_pass in self.model.passes:
            phases[model_pass.phase] = self.during_pass(model_pass)
        if "log-probs" in phases:
            phases["weight sync"] = self.weight_sync()
        return PartMemory(at_rest=self.at_rest(), phases=phases)

    # Memory on the device.

    def at_rest(self) -> MemoryTerms:
        """Returns what stands while others work: what is offloaded does not."""
        weights = self.weight_bytes
        if self.run.on_cuda and self.model.fsdp.param_offload:
            weights = 0
        return MemoryTerms(weights=weights, optimiser=self._moments_at_rest())

    def in_use(self) -> MemoryTerms:
        """Returns what stands while the model is read: its weights, wherever they were before."""
        return MemoryTerms(weights=self.weight_bytes, optimiser=self._moments_at_rest())

    def in_update(self) -> MemoryTerms:
        """Returns what stands in an update, which needs the moments, too."""
        return MemoryTerms(weights=self.weight_bytes, optimiser=self.moment_bytes)

    def _moments_at_rest(self) -> int:
        if self.run.on_cuda and self.model.fsdp.optimizer_offload:
            return 0
        return self.moment_bytes

    # The phases.

    def generation(self) -> MemoryTerms:
        """Plans generation: the model rests, or is on other ranks than the engines."""
        if self.run.num_engine_ranks:
            return MemoryTerms()
        return self.at_rest()

    def checkpoint(self) -> MemoryTerms:
        """Plans saving: the copy that is written lies in CPU memory, of what trains."""
        if self.run.on_cuda:
            return self.at_rest()
        copies = SAVED_BYTES * self.num_trained // self.run.num_ranks + self.moment_bytes
        return self.at_rest() + MemoryTerms(copies=copies)

    def during_pass(self, model_pass: ModelPass) -> MemoryTerms:
        """Plans a pass: what it makes, what it gathers, and what stands."""
        standing = self.in_update() if model_pass.updates else self.in_use()
        made = peak_of_pass(self.model, model_pass, self.run, self.mode)
        copies = self._gathered_bytes(updates=model_pass.updates)
        return standing + made + MemoryTerms(copies=copies)

    def weight_sync(self) -> MemoryTerms:
        """Plans sending the policy's weights to the engine, and scoring the canaries then."""
        if self.run.num_ranks > 1:
            copies = self._gathered_bytes(updates=False)
        else:
            # A weight is cast to be sent, the largest are embedding and head; and the canaries'
            # pass casts those that train, which autocast keeps until it ends.
            copies = CAST_BYTES * max(self.num_trained, self.num_outer)
        return self.in_use() + MemoryTerms(copies=copies)

    # Weights that FSDP2 gathers.

    def _gathered_bytes(self, *, updates: bool) -> int:
        """Counts the bytes that FSDP2 gathers at a time, in the compute type; of one rank none."""
        if self.run.num_ranks == 1:
            return 0
        # The outer weights stay for the whole pass; of the blocks there are the one that is
        # computed and the next, or all, once gathered.
        numbers = self.num_parameters
        if self.model.fsdp.reshard_after_forward:
            numbers = self.num_outer + 2 * self.num_per_block
        if updates:
            # Before they are reduced, gradients are as whole as weights: of the outer ones and of
            # three blocks, as far as these train.
            with_gradients = self.num_outer + 3 * self.num_per_block
            numbers += with_gradients * self.num_trained // self.num_parameters
        return self._compute_dtype.itemsize * numbers

    def store_as_gathered(self) -> None:
        """Gives the parameters the compute type, if FSDP2 gathers them in it.

        Else autocast's casts would count as activations.
        """
        if self.run.num_ranks == 1:
            return
        for parameter in self.parameters:
            parameter.data = parameter.data.to(self._compute_dtype)

    @property
    def _compute_dtype(self) -> torch.dtype:
        """Returns the type that the model computes in."""
        return self.model.loop.settings.dtype


def state_bytes(model: PlannedModel, mode: FakeTensorMode) -> int:
    """Counts the bytes of an optimiser's state, of the whole model, by a step without numbers.

    One whose step reads its numbers is planned as AdamW, which has two moments of each parameter.
    """
    if model.optim is None:
        return 0
    try:
        return _bytes_after_step(model.loop.trained, model.optim, mode)
    except DataDependentOutputException:
        logger.warning(
            "a step of %s reads numbers, which a plan has not: planned as AdamW",
            model.optim.optimizer,
        )
        return _bytes_after_step(model.loop.trained, OptimConfig(), mode)


def _bytes_after_step(module: nn.Module, optim: OptimConfig, mode: FakeTensorMode) -> int:
    """Makes an optimiser and steps once; returns the bytes of its state, but for single numbers."""
    with mode:
        optimizer = build_optimizer(module, optim)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        try:
            optimizer.step()
        finally:
            optimizer.zero_grad(set_to_none=True)
    total = 0
    for state in optimizer.state.values():
        tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
        total += sum(tensor.nbytes for tensor in tensors if tensor.dim() > 0)
    return total
