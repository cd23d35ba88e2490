"""SHIM: the update's names under the module that had them all."""

from workers.model.mini_batches import global_counts as global_counts
from workers.model.mini_batches import rows_of_updates as rows_of_updates
from workers.model.optimizer import build_optimizer as build_optimizer
from workers.model.optimizer import build_scheduler as build_scheduler
from workers.model.update_loop import MicroLoss as MicroLoss
from workers.model.update_loop import UpdateLoop as Trained
from workers.model.update_loop import UpdateLoop as UpdateLoop
from workers.model.update_loop import clip_grad_norm as clip_grad_norm
from workers.model.update_metrics import MetricSums as MetricSums

__all__ = [
    "MetricSums",
    "MicroLoss",
    "Trained",
    "UpdateLoop",
    "build_optimizer",
    "build_scheduler",
    "clip_grad_norm",
    "global_counts",
    "rows_of_updates",
]
