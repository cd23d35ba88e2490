"""What a feature has the policy's update learn beside the rows that were played: `FurtherRows`.

    gradient of a mini-batch  =  the policy's loss on its rows  +  coef * the loss on further rows

The rows of an update follow from its number in the run, so that a checkpoint keeps nothing of them.
The core knows none by name; `open_further_rows` opens those of a run. In contrast to a probe
(probe.py) they are a part of the algorithm: what raises ends the run. Invariant: the gradient does
not depend on how the rows are cut into micro-batches, or over ranks; without any an update is
bitwise what it is without this file.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from data.loading import load_object
from data.protocol import DataProto
from training.config import PPOConfig
from training.core_algos import GlobalBatchInfo
from training.features import named
from workers.model.builder import ModelSpec


class FurtherRows(ABC):
    """Gives each update of the policy rows of its own, and their loss.

    Attributes:
        metric: what their loss, before the coefficient, is called among the metrics; begins with
            `actor/` and ends with `_loss`.
        coef: what their loss is multiplied with.
    """

    metric: str
    coef: float

    @abstractmethod
    def batch(self, update: int, share: int, shares: int) -> DataProto:
        """Returns a part of an update's rows, at least one; one that only pads has mask 0.

        Its `response_mask` (rows, response_len) marks the tokens that are learnt; prompts,
        responses and attention_mask are as in every batch.

        Args:
            update: the number of the policy's update in the run, from 0 on.
            share: of so many `shares`, which together have all rows of the update.
        """

    @abstractmethod
    def loss(self, log_prob: Tensor, response_mask: Tensor, counts: GlobalBatchInfo) -> Tensor:
        """Computes a micro-batch's share of the loss: 0-dim, with the factor of all ranks.

        Args:
            log_prob: (rows, response_len) with its gradient, 0 outside of `response_mask`.
            counts: of all rows of the update, over all ranks.
        """


def open_further_rows(config: PPOConfig, spec: ModelSpec) -> list[FurtherRows]:
    """Opens the rows that features bring (`Feature.further_rows`) and the config asks for.

    Raises:
        TypeError: a feature returned anything else.
    """
    rows: list[FurtherRows] = []
    for feature, place in named("further_rows"):
        opened = list(load_object(place, f"feature {feature}")(config, spec))
        if not all(isinstance(each, FurtherRows) for each in opened):
            raise TypeError(
                f"further_rows={place!r} of feature {feature} returned {opened!r}: return a list "
                "of FurtherRows, an empty one where the config turns them off"
            )
        rows += opened
    return rows
