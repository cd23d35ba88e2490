"""Which cases of a parametrised test `make test` runs; the others are `make test-long`'s."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def fast_and_long(cases: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Marks the cases that are not among the `fast` ones as long; each of `fast` must be a case."""
    cases = list(cases)
    unknown = [case for case in fast if case not in cases]
    assert not unknown, f"{unknown} are no cases: {cases}"
    return [pytest.param(case, marks=() if case in fast else pytest.mark.long) for case in cases]
