"""The base class of reward managers written for verl; those of this project need none."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from custom import reward_manager
from data.protocol import DataProto


class AbstractRewardManager(ABC):
    """Says what a manager is built with, and called with."""

    @abstractmethod
    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None:
        """Keeps what it needs: see `NaiveRewardManager` of custom/reward_managers/naive.py."""

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Returns rewards (batch, response_len), or a dict with them as `reward_tensor`."""


def __getattr__(name: str) -> Any:
    """Returns what custom.reward_manager has."""
    return getattr(reward_manager, name)
