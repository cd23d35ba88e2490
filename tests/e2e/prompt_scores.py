"""Scores of answers for test_agents.py's training on prompts."""

from __future__ import annotations

import random
from typing import Any


def varies(ground_truth: str) -> bool:
    """Whether answers to this prompt get different scores in `some_vary`."""
    return int(ground_truth.split()[0]) % 3 == 0


def some_vary(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None
) -> float:
    return random.random() if varies(ground_truth) else 0.5


def all_equal(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None
) -> float:
    return 0.5
