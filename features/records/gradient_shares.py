"""Each row's share of an update's gradient, <g_row, G> / ||G||^2.

G is the gradient of a mini-batch, and g_row what one row's loss gives to it, so that the shares of
an update sum to 1: negative where the other rows pull the other way. Invariant: the gradient that
the update makes is read and never changed.
"""

import torch
from torch import Tensor, nn

from data.protocol import DataProto
from training.config import MicroBatching
from workers.model.forward_settings import ForwardSettings
from workers.model.micro_batches import iter_micro_batches
from workers.model.probe import LossOf

ONE_ROW = MicroBatching(micro_batch_size=1)


def gradient_shares(
    module: nn.Module, mini: DataProto, settings: ForwardSettings, loss_of: LossOf
) -> Tensor:
    """Computes each row's share of the gradient that the module has, (rows,) float64 on the CPU.

    Zeros where that is zero, or not finite. It takes a forward and a backward pass, row by row.
    """
    shares = torch.zeros(len(mini), dtype=torch.float64)
    parameters = [each for each in module.parameters() if each.grad is not None]
    whole = [each.grad.detach().double() for each in parameters if each.grad is not None]
    square = sum(float(gradient.square().sum()) for gradient in whole)
    if not 0 < square < float("inf"):
        return shares
    for rows, micro, inputs in iter_micro_batches(mini, settings, ONE_ROW):
        loss = loss_of(micro, inputs)
        if not loss.requires_grad:
            continue
        of_row = torch.autograd.grad(loss, parameters, allow_unused=True)
        products = [
            (gradient.double() * total).sum()
            for gradient, total in zip(of_row, whole, strict=True)
            if gradient is not None
        ]
        shares[rows] = float(sum(products)) / square
    return shares
