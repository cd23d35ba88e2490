"""Every run that these tests make has metrics that docs/metrics.md explains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from training.run.metric_names import find_metric
from training.run.metrics_file import read_records

# Of losses, estimators, reward functions and observers that a test defines.
OWN = {"actor/mean_ratio", "mine/tokens", "mine/sampled_tokens", "mine/tokens_without_spread"}


@pytest.fixture(autouse=True)
def every_metric_has_a_sentence(tmp_path: Path) -> Iterator[None]:
    """Looks, after a test, at the metrics of the runs in its folder."""
    yield
    check_metrics(tmp_path)


def check_metrics(folder: Path) -> None:
    """Checks that the docs explain each metric of the runs in a folder."""
    names: set[str] = set()
    for file in folder.rglob("metrics.jsonl"):
        for record in read_records(file):
            names.update(record)
    # Names without a slash are of records that a test wrote itself.
    unexplained = [name for name in sorted(names - OWN) if "/" in name and not find_metric(name)]
    assert not unexplained, f"training/run/metric_names.yaml, or a feature's, lacks {unexplained}"
