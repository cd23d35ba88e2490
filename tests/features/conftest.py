"""What tests of features have of those of the core.

The settings of a run that passes every check; and the runs of features, too, have only metrics that
docs/metrics.md explains.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import check_metrics
from tests.unit.config.conftest import runnable as runnable


@pytest.fixture(autouse=True)
def every_metric_has_a_sentence(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """Looks, after a test in a folder runs/, at the metrics of its runs."""
    yield
    if "runs" in request.path.parts:
        check_metrics(tmp_path)
