"""The reward of configs/tiny_prompts.yaml; it reads the text alone, and lies between 0 and 1."""

from __future__ import annotations

import re
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None
) -> float:
    """Scores 1 for a guess that halves what is left, 0.2 for one that only respects it.

    All else scores 0. `ground_truth` is "ABOVE BELOW"; the answer must be exactly "guess N".
    """
    above, below = (int(bound) for bound in ground_truth.split())
    match = re.fullmatch(r"\s*guess (\d+)\s*", solution_str)
    if match is None or not above < int(match[1]) < below:
        return 0.0
    guess = int(match[1])
    return 1.0 if abs((guess - above) - (below - guess)) <= 1 else 0.2
