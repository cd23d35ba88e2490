"""Muon for the matrices of a model, AdamW for all else, as one optimiser.

torch's Muon takes matrices alone (Jordan et al. 2024; scaled as in arXiv:2502.16982). Embeddings,
heads, norms and biases are AdamW's. Invariant: the parts share this optimiser's groups and state,
so that a schedule, a checkpoint or an offload that changes those changes theirs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import AdamW, Muon, Optimizer
from transformers import PreTrainedModel


class MuonAndAdamW(Optimizer):
    """Makes one step of both.

    Args:
        matrices, others: the parameters of Muon and of AdamW; one of them may be empty.
        lr, weight_decay: of both.
        betas: AdamW's.
        muon: further arguments of torch.optim.Muon, by name. Its update is scaled as large as one
            of AdamW's by default, so that one learning rate serves both.
    """

    def __init__(
        self,
        matrices: list[Parameter],
        others: list[Parameter],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        muon: dict[str, Any],
    ) -> None:
        self.parts: list[Optimizer] = []
        if matrices:
            settings = {"adjust_lr_fn": "match_rms_adamw"} | muon
            self.parts.append(Muon(matrices, lr=lr, weight_decay=weight_decay, **settings))
        if others:
            adamw = AdamW(others, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
            self.parts.append(adamw)
        groups = [group for part in self.parts for group in part.param_groups]
        super().__init__(groups, defaults={"lr": lr})
        self._share()

    def _share(self) -> None:
        """Gives each part its groups of this optimiser, and the state."""
        first = 0
        for part in self.parts:
            last = first + len(part.param_groups)
            part.param_groups = self.param_groups[first:last]
            part.state = self.state
            first = last

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes the groups and state of `load_state_dict`, which are other objects."""
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Steps both parts; `closure` computes the loss anew, where one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss


def matrices_and_others(module: nn.Module) -> tuple[list[Parameter], list[Parameter]]:
    """Parts what trains: the weights of linear layers inside of the model, and all else.

    What turns hidden states into logits or values is a head, and no such layer: one side of it is
    the vocabulary, or 1. Experts that are fused into one tensor have three dimensions.
    """
    heads = set()
    inner = set()
    for layer in module.modules():
        if isinstance(layer, PreTrainedModel) and layer.get_output_embeddings() is not None:
            heads.add(id(layer.get_output_embeddings().weight))
        if isinstance(layer, nn.Linear) and 1 not in layer.weight.shape:
            inner.add(id(layer.weight))
    inner -= heads
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if id(parameter) in inner]
    others = [parameter for parameter in trained if id(parameter) not in inner]
    return matrices, others
