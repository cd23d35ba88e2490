"""verl's class of samplers that learn from what happened."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch

from data.protocol import DataProto
from features.verl.sampler import AbstractCurriculumSampler
from tests.unit.test_curriculum import order_of


def test_verls_class_of_such_samplers_is_there() -> None:
    class Mine(AbstractCurriculumSampler):
        def __init__(self, data_source: Sized, data_config: Any) -> None:
            self.seen: list[DataProto] = []

        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

        def __len__(self) -> int:
            return 3

        def update(self, batch: DataProto) -> None:
            self.seen.append(batch)

    order = order_of(Mine([], None))
    assert order.learns and list(order) == [0, 1, 2] and len(order) == 3
    assert not order_of(torch.utils.data.SequentialSampler(range(3))).learns
