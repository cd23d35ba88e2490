"""Where a step's first gradient points, and whether gradients are all there when a step is made.

Before the first update the policy is the one that sampled, so that every policy loss has the
gradient -A x (a weight that is not negative) in each token's log-prob. Its cosine with -A is 1
where the weights are equal, and negative where a sign is wrong. So it is with a critic, whose
values go towards the returns.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from features.alarms.probes.movement import trained_tensors
from workers.model.loss_fields import LossFields
from workers.model.probe import (
    GroupCounts,
    LossOf,
    MicroBatch,
    MiniBatch,
    SummingProbe,
    TrainedModel,
)
from workers.ranks.process_groups import world_size

# What the cosine is made of.
PARTS = ("descent", "gradient_square", "direction_square")


class GradientAlignment(SummingProbe):
    """Measures MODEL/gradient_alignment, the cosine of a step's first gradient.

    The policy's is with the advantages, the critic's with what values lack to the returns.
    """

    def before_backward(
        self, micro: MicroBatch, fields: LossFields, outputs: Mapping[str, Tensor], loss: Tensor
    ) -> None:
        """Watches the gradients of a micro-batch's outputs, in the first update."""
        if self.mini.number > 0:
            return
        if "log_prob" in outputs:
            self._watch("actor", outputs["log_prob"], fields["advantages"])
        if "values" in outputs:
            batch = micro.rows.batch
            missing = (batch["returns"] - batch["values"]) * batch["response_mask"]
            values = outputs["values"]
            self._watch("critic", values, missing.to(values.device))

    def _watch(self, model: str, output: Tensor, direction: Tensor) -> None:
        """Adds the parts of the cosine, once the backward pass is through.

        Args:
            output: log-probs, or values, with a gradient; direction: advantages, or returns less
                values: (rows, response_len) each, zero where nothing was sampled.
        """
        # The hook holds no graph: a graph that its own hook holds is never freed.
        weight = self.mini.weight
        sums = self.sums

        def measure(gradient: Tensor) -> None:
            parts = alignment_sums(gradient.detach().float(), direction.float())
            names = [f"{model} {name}" for name in PARTS]
            sums.add(dict(zip(names, parts, strict=True)), weight)

        if output.requires_grad:
            output.register_hook(self.guarded(measure))

    def divide(self, by: GroupCounts) -> None:
        """Divides the parts, as they are means over tokens."""
        self.sums.divide(by.tokens, {})

    def metrics_of(self, totals: dict[str, float]) -> dict[str, float]:
        """Makes the cosines of the parts; none where one of the two vectors is zero."""
        metrics = {}
        for model in ("actor", "critic"):
            if f"{model} {PARTS[0]}" not in totals:
                continue
            descent, gradient_square, direction_square = (
                totals[f"{model} {name}"] for name in PARTS
            )
            length = (gradient_square * direction_square) ** 0.5
            if length > torch.finfo(torch.float32).tiny:
                metrics[f"{model}/gradient_alignment"] = descent / length
        return metrics


def alignment_sums(gradient: Tensor, direction: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums what the cosine is made of: 0-dim each."""
    descent = -(gradient * direction).sum()
    return descent, gradient.square().sum(), direction.square().sum()


class KeptGradients(SummingProbe):
    """Counts MODEL/kept_gradients, those that an update begins with: a mean over ranks."""

    def begin(self, model: TrainedModel, mini: MiniBatch) -> None:
        """Counts them."""
        super().begin(model, mini)
        share = model.settings.sequence_ranks / world_size()
        prefix = model.name
        self.sums.add({f"{prefix}/kept_gradients": count_gradients(model.module)}, share)


def count_gradients(module: nn.Module) -> float:
    """Counts the parameters that have a gradient other than zero."""
    gradients = [parameter.grad for parameter in module.parameters()]
    return float(sum(bool(gradient.any()) for gradient in gradients if gradient is not None))


class RepeatedBackward(SummingProbe):
    """Counts MODEL/repeated_backward: backward passes of a loss behind its first one.

    Each adds the same gradient once more: a mean over ranks.
    """

    def before_backward(
        self, micro: MicroBatch, fields: LossFields, outputs: Mapping[str, Tensor], loss: Tensor
    ) -> None:
        """Counts the backward passes through a micro-batch's loss."""
        share = self.model.settings.sequence_ranks / world_size()
        name = f"{self.model.name}/repeated_backward"
        sums = self.sums

        def count(gradient: Tensor) -> None:
            sums.add({name: 1.0}, share)

        if loss.requires_grad:
            # The first pass is the one that is meant: only further ones are counted.
            sums.add({name: -1.0}, share)
            loss.register_hook(self.guarded(count))

    def metrics_of(self, totals: dict[str, float]) -> dict[str, float]:
        """Leaves losses that had no pass at all to the other probes."""
        return {name: max(round(count, 6), 0.0) for name, count in totals.items()}


class LostGradients(SummingProbe):
    """Measures MODEL/missing_gradient: what a step's gradient lacks of its micro-batches'.

    What comes back to one small tensor is added up, micro-batch by micro-batch, and compared with
    the gradient that it has in the end. The metric is a share of the gradient that there should be:
    0 where nothing is missing, and where the model is sharded over ranks, whose gradients are
    reduced on their way.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_sharded = False
        self._parameter: Tensor | None = None
        self._total = torch.zeros(())
        self._hook: Any = None

    def loaded(self, model: TrainedModel) -> None:
        """Notes whether the model is sharded, also where a forward pass leaves it gathered."""
        self._is_sharded = any(isinstance(each, DTensor) for each in model.module.parameters())

    def begin(self, model: TrainedModel, mini: MiniBatch) -> None:
        """Watches the smallest tensor."""
        super().begin(model, mini)
        self._let_go()
        parameter = _smallest(model.module)
        if parameter is None or self._is_sharded:
            return
        self._parameter = parameter
        self._total = _gradient(parameter)
        self._hook = parameter.register_hook(self.guarded(self._add))

    def _add(self, gradient: Tensor) -> None:
        # Groups that come one by one may find the model on another device than it was.
        self._total = self._total.to(gradient.device) + gradient.detach()

    def divide(self, by: GroupCounts) -> None:
        """Divides what came back, as the gradient was."""
        self._total = self._total / by.loss

    def before_step(self, model: TrainedModel, mini: MiniBatch, loss_of: LossOf) -> None:
        """Compares what came back with the gradient."""
        missing = torch.zeros(())
        if self._parameter is not None:
            total = self._total.to(self._parameter.device)
            distance = (_gradient(self._parameter) - total).float().norm()
            missing = distance / total.float().norm().clamp(min=torch.finfo(torch.float32).tiny)
        prefix = model.name
        self.sums.maximum({f"{prefix}/missing_gradient": missing})
        self._let_go()

    def _let_go(self) -> None:
        """Watches nothing."""
        self._parameter = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _smallest(module: nn.Module) -> Tensor | None:
    """Returns the smallest of the parameters that every batch reaches."""
    parameters = dict(module.named_parameters())
    trained = [parameters[name] for name in trained_tensors(module)]
    return min(trained, key=torch.numel, default=None)


def _gradient(parameter: Tensor) -> Tensor:
    """Copies the gradient; zeros where there is none."""
    if parameter.grad is None:
        return torch.zeros_like(parameter, requires_grad=False)
    return parameter.grad.detach().clone()
