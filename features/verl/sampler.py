"""The base classes of samplers written for verl; `data.sampler` takes any torch Sampler."""

from abc import abstractmethod
from collections.abc import Sized
from typing import Any

from torch.utils.data import Sampler

from data.protocol import DataProto


class AbstractSampler(Sampler[int]):
    """Says what a sampler is built with: the dataset, and the config's section `data`."""

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Any) -> None:
        """Keeps what it needs."""


class AbstractCurriculumSampler(AbstractSampler):
    """Is told what came of the rows: the trainer calls `update` behind each step."""

    @abstractmethod
    def update(self, batch: DataProto) -> None:
        """Learns from a step's batch, with its rewards and advantages."""
