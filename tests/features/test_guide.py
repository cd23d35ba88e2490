"""The feature that docs/features.md writes trains as it stands there, and touches no other file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.e2e.test_deletion import copy_without, run, write_count

NAME = "gpu_seconds"
# Prints the kinds of observers that the feature opens: as it is, and turned off.
OPENED = """
from pathlib import Path
from features.gpu_seconds.switch import open_counter
from training.config.loader import load_config
from training.observers import ObservedRun
for words in ([], ["gpu_seconds.enable=false"]):
    config = load_config(words, check=False).config
    print(type(open_counter(ObservedRun(config=config, run_dir=Path()))).__name__)
"""


def write_files(folder: Path, section: str) -> list[str]:
    """Writes the files of a section of the page, whose names stand in their first lines."""
    page = (PROJECT / "docs/features.md").read_text()
    [text] = re.findall(rf"## {section}\n(.*?)\n## ", page, re.DOTALL)
    blocks = re.findall(r"```\w+\n(# (\w+\.\w+)\n.*?)```", text, re.DOTALL)
    new = folder / "features" / NAME
    new.mkdir(exist_ok=True)
    for code, name in blocks:
        (new / name).write_text(code)
    return [code for code, _ in blocks]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_feature_of_the_page_takes_thirty_lines_and_has_a_chart_on_the_run_page(
    tmp_path: Path, tiny_game: Path
) -> None:
    folder = tmp_path / "checkout"
    copy_without(folder, [])
    blocks = write_files(folder, "Write a feature")
    lines = [line for code in blocks for line in code.splitlines()[1:] if line]
    assert len(blocks) == 3 and len(lines) <= 30
    write_count(folder, tiny_game / "model")

    run(folder, "main.py", "count.yaml")
    records = (folder / "outputs/count/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in records if "timing_s/step" in line]
    seconds = [step["timing_s/step"] for step in steps]
    assert len(seconds) == 2
    # A step of four tasks.
    assert [step[f"{NAME}/per_task"] for step in steps] == pytest.approx([s / 4 for s in seconds])

    page = (folder / "outputs/count/report.html").read_text()
    [shown] = re.findall(r'id="content">(.*?)</script>', page, re.DOTALL)
    content = json.loads(shown)
    title = "GPU seconds of a task"
    [chart] = [chart for chart in content["charts"] if chart["title"] == title]
    assert [line["metric"] for line in chart["lines"]] == [f"{NAME}/per_task"]
    assert chart["unit"] == "seconds"
    assert title in [tile["label"] for tile in content["runs"][0]["summary"]]
    said = run(folder, "-m", "training.run.metric_names", "outputs/count")
    assert "(seconds): Seconds of the step times its ranks, divided by its tasks." in said

    assert len(write_files(folder, "Give it a setting")) == 3
    explained = run(folder, "main.py", "count.yaml", f"{NAME}.enable=false", "--explain")
    assert re.search(rf"{NAME}\.enable +false +command line", explained)
    assert run(folder, "-c", OPENED).split() == ["GpuSeconds", "NoneType"]
