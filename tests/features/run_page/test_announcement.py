"""The console says where the page is once a run begins, in lines that fit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.watchdog import ATTEMPT
from features.run_page.announcement import say_where
from features.run_page.observer import open_page
from training.config.loader import load_config

WORDS = ("configs/quickstart.yaml", "trainer.default_local_dir=outputs/told/run")


def said(capsys: pytest.CaptureFixture[str], *settings: str) -> str:
    config = load_config([*WORDS, *settings], check=False).config
    say_where(config, Path(config.trainer.run_dir))
    return capsys.readouterr().out


def test_it_says_where_page_and_viewer_are(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys).splitlines()
    assert "  outputs/told/run/report.html" in lines
    assert "  outputs/told/run/viewer/index.html" in lines
    assert all(len(line) <= 80 for line in lines)


def test_no_viewer_is_promised_to_a_run_that_records_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = said(capsys, "records.keep_gib=0").splitlines()
    assert lines[1:] == ["  outputs/told/run/report.html"]


@pytest.mark.parametrize(
    ("logger", "attempt", "is_said"),
    [("file", "1", True), ("console", "1", False), ("file", "2", False)],
)
def test_it_is_said_when_the_run_begins_and_the_page_is_there(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    logger: str,
    attempt: str,
    is_said: bool,
) -> None:
    # The attempt before has said it.
    monkeypatch.setenv(ATTEMPT, attempt)
    words = [WORDS[0], f"trainer.logger={logger}"]
    config = load_config(words, check=False).config
    run: Any = SimpleNamespace(config=config, run_dir=tmp_path, step=0, total_steps=2, changes={})
    record = open_page(run)
    assert record is not None
    assert capsys.readouterr().out == ""
    record.run_started(0, ())
    assert (str(tmp_path / "report.html") in capsys.readouterr().out) == is_said
    assert (tmp_path / "report.html").exists() == (logger == "file")
