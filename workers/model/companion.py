"""What a feature keeps beside the policy on every rank: a `Companion`, such as a teacher.

It is opened behind the actor, by the worker that holds it, and may read the actor's model, keep
weights of its own, or load another model. The worker calls, on every rank together:

    begin      the policy's weights are there: loaded, or read from a checkpoint that has nothing of
               the companion
    read       the driver asks something of a batch (`ask_companion`)
    updated    an update of the policy has been made
    tensors    a checkpoint is written, or read in place

What it raises ends the run. Invariant: outside of `updated` and `begin` its tensors, and always the
policy's, are what they were before the call; a checkpoint that is being written may be copying
them, so that whatever changes them meanwhile waits for `wait_until_copied` first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from data.loading import load_object
from data.protocol import DataProto
from training.config import PPOConfig
from training.features import named

# The meta_info of a batch that is asked about: the name of the companion that is to answer.
ASKED = "companion"


class Companion(ABC):
    """Stands beside the policy on a rank.

    Attributes:
        name: by which the driver asks it, and of its folder in checkpoints; a part of a path.
    """

    name: str

    @abstractmethod
    def read(self, data: DataProto) -> DataProto:
        """Answers about this rank's rows: a DataProto of as many rows.

        Args:
            data: what the driver sent, with the temperature of sampling in its meta_info. The
                policy's model is on the device.
        """

    def begin(self) -> None:  # noqa: B027  (optional hook)
        """Begins from the policy's weights as they are."""

    def updated(self) -> None:  # noqa: B027  (optional hook)
        """Sees that an update of the policy has been made; its model is on the device."""

    def tensors(self) -> dict[str, Tensor]:
        """Returns what a checkpoint keeps of it by name, sharded as it is; read back in place."""
        return {}


def open_companions(config: PPOConfig, worker: Any) -> dict[str, Companion]:
    """Opens the companions that features bring (`Feature.companion`) and the config asks for.

    Args:
        worker: `ActorRolloutRefWorker`, whose actor is built.

    Raises:
        ValueError: two have one name.
    """
    opened: dict[str, Companion] = {}
    for feature, companion in _opened(config, worker):
        if companion.name in opened:
            raise ValueError(
                f"the companion {companion.name} of feature {feature} has the name of another "
                "one: a checkpoint has a folder for each, so give it another name"
            )
        opened[companion.name] = companion
    return opened


def _opened(config: PPOConfig, worker: Any) -> Iterator[tuple[str, Companion]]:
    for feature, place in named("companion"):
        companion = load_object(place, f"feature {feature}")(config, worker)
        if companion is not None:
            yield feature, companion
