"""The feature that docs/features.md writes trains as it stands there, and touches no other file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.e2e.test_deletion import copy_without, run, write_count

NAME = "gpu_seconds"


def write_feature(folder: Path) -> None:
    """Writes the page's files, whose names stand in their first lines."""
    page = (PROJECT / "docs/features.md").read_text()
    blocks = re.findall(r"```python\n(# (\w+\.py)\n.*?)```", page, re.DOTALL)
    assert [name for _, name in blocks] == ["settings.py", "counter.py", "feature.py"]
    new = folder / "features" / NAME
    new.mkdir()
    for code, name in blocks:
        (new / name).write_text(code)


@pytest.mark.timeout(600)
def test_the_feature_of_the_page_shows_its_metrics_on_the_run_page(
    tmp_path: Path, tiny_game: Path
) -> None:
    folder = tmp_path / "checkout"
    copy_without(folder, NAME)
    write_feature(folder)
    write_count(folder, tiny_game / "model")

    run(folder, "main.py", "count.yaml")
    lines = (folder / "outputs/count/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines if "timing_s/step" in line]
    seconds = [step["timing_s/step"] for step in steps]
    assert len(seconds) == 2
    # A step of four tasks.
    assert [step[f"{NAME}/per_task"] for step in steps] == pytest.approx([s / 4 for s in seconds])
    assert steps[-1][f"{NAME}/total"] == pytest.approx(sum(seconds))
    assert f"{NAME}/per_task" in (folder / "outputs/count/report.html").read_text()

    explained = run(folder, "main.py", "count.yaml", f"{NAME}.enable=false", "--explain")
    assert re.search(rf"{NAME}\.enable +false +command line", explained)
