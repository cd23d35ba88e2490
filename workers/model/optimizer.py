"""The optimiser and its schedule, as `actor.optim` and `critic.optim` set them.

Invariant: only parameters that train are the optimiser's, and the schedule advances once a training
step.
"""

import importlib
import inspect
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from data.loading import load_object
from data.names import did_you_mean
from training.batch.schedules import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_wsd_schedule_with_warmup,
)
from training.config import OptimConfig
from workers.model.muon import MuonAndAdamW, matrices_and_others
from workers.model.sharded_step import try_sharded_step

# Those whose fused form takes parameters that several ranks share, too.
FUSED = (torch.optim.Adam, torch.optim.AdamW)


def build_optimizer(module: nn.Module, optim: OptimConfig) -> Optimizer:
    """Makes the optimiser of what trains in a module.

    Adam and AdamW are fused: one pass over memory on CPU and CUDA alike.

    Raises:
        ValueError: there is no such class, or it does not take what the settings give it, or it
            makes no right step of parameters that several ranks share.
    """
    made_by = optimizer_class(optim)
    if made_by is torch.optim.Muon:
        matrices, others = matrices_and_others(module)
        return MuonAndAdamW(
            matrices,
            others,
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            betas=(optim.betas[0], optim.betas[1]),
            muon=optim.override_optimizer_config or {},
        )
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    arguments = optimizer_arguments(made_by, optim)

    def make(these: list[Parameter]) -> Optimizer:
        return made_by(these, **arguments)

    if made_by not in FUSED:
        try_sharded_step(make, parameters, optim.optimizer, "AdamW or Muon")
    return make(parameters)


def optimizer_class(optim: OptimConfig) -> type[Optimizer]:
    """Returns the class that `optimizer` names.

    Raises:
        ValueError: there is none of that name.
        ModuleNotFoundError: there is no module `optimizer_impl`.
    """
    name = optim.optimizer
    if ":" in name:
        found = load_object(name, "optim.optimizer")
        if not is_optimizer(found):
            raise ValueError(f"optim.optimizer={name} is no class of torch.optim.Optimizer")
        return found
    module = importlib.import_module(optim.optimizer_impl)
    known = [key for key, value in vars(module).items() if is_optimizer(value)]
    if name not in known:
        raise ValueError(
            f"optim.optimizer={name}: {optim.optimizer_impl} has "
            f"{', '.join(sorted(known)) or 'no optimiser'}; or give FILE.py:CLASS."
            f"{did_you_mean(name, known)}"
        )
    return vars(module)[name]


def is_optimizer(found: object) -> TypeGuard[type[Optimizer]]:
    """Tells whether something is a class of optimisers that can be made."""
    return isinstance(found, type) and issubclass(found, Optimizer) and found is not Optimizer


def optimizer_arguments(made_by: type[Optimizer], optim: OptimConfig) -> dict[str, Any]:
    """Returns what an optimiser is made with: of lr, betas and weight_decay what it takes.

    Raises:
        ValueError: betas or weight_decay are set to other values than by default, and the class
            does not take them; or `override_optimizer_config` holds what it does not take.
    """
    takes = inspect.signature(made_by).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    arguments: dict[str, Any] = {"lr": optim.lr}
    plain = OptimConfig()
    for name in ("betas", "weight_decay"):
        value = getattr(optim, name)
        if name in takes:
            arguments[name] = tuple(value) if name == "betas" else value
        elif value != getattr(plain, name):
            raise ValueError(
                f"optim.{name}={value}: {optim.optimizer} takes no {name}; leave it at its default"
            )
    if made_by in FUSED:
        arguments["fused"] = True
    for name, value in (optim.override_optimizer_config or {}).items():
        if name not in takes and not takes_all:
            raise ValueError(
                f"optim.override_optimizer_config.{name}: {optim.optimizer} takes "
                f"{', '.join(list(takes)[1:])}.{did_you_mean(name, list(takes))}"
            )
        arguments[name] = value
    return arguments


def try_optimizer(optim: OptimConfig) -> None:
    """Makes the optimiser for a matrix and a bias, and steps once.

    Raises:
        ValueError: as `build_optimizer`, or the step leaves the numbers as they were.
        Exception: whatever the class raises.
    """
    layer = nn.Linear(4, 4)
    before = layer.weight.detach().clone()
    optimizer = build_optimizer(layer, optim)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    if torch.equal(before, layer.weight):
        raise ValueError(f"optim.optimizer={optim.optimizer}: a step with lr 0.1 changed nothing")


def build_scheduler(optimizer: Optimizer, optim: OptimConfig, total_steps: int) -> LRScheduler:
    """Makes the schedule over `total_steps` training steps, not optimiser steps.

    Warm-up is `lr_warmup_steps`, or a ratio of all steps where that is negative. wsd
    (arXiv:2404.06395) holds the rate for nine tenths of the steps after the warm-up, and then
    decays by a cosine.
    """
    warmup_steps = optim.lr_warmup_steps
    if warmup_steps < 0:
        warmup_steps = int(optim.lr_warmup_steps_ratio * total_steps)
    if optim.scheduler == "constant":
        return get_constant_schedule_with_warmup(optimizer, warmup_steps)
    if optim.scheduler == "cosine":
        return get_cosine_schedule_with_warmup(
            optimizer,
            warmup_steps,
            total_steps,
            min_lr_ratio=optim.min_lr_ratio,
            num_cycles=optim.num_cycles,
        )
    return get_wsd_schedule_with_warmup(
        optimizer, warmup_steps, total_steps, min_lr_ratio=optim.min_lr_ratio
    )
