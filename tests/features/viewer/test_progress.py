"""How far the making of a viewer is: told before it begins, and while it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from features.viewer.command import main
from features.viewer.progress import Lines
from tests.made_episodes import Made, make_run


def test_it_says_at_once_how_many_episodes_it_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, Made(steps=2, groups=2, members=2))
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert shown.err.splitlines()[0] == "reading 8 episodes of 2 files"
    assert "8 episodes" in shown.out


def test_it_says_every_20_seconds_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = 0.0
    lines = Lines(400, clock=lambda: seconds)
    for _ in range(100):
        seconds += 0.5
        lines.advance()
    assert capsys.readouterr().err.splitlines() == [
        "40 of 400 episodes, about 180 s more",
        "80 of 400 episodes, about 160 s more",
    ]
