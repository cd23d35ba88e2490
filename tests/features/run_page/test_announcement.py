"""The console says where the page will be, before anything is loaded, in lines that fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.watchdog import ATTEMPT
from features.run_page.announcement import PAGE, say_where
from features.run_page.writer import PAGE as WRITTEN
from training.config.loader import load_config

WORDS = ("configs/quickstart.yaml", "trainer.default_local_dir=outputs/told/run")


def said(capsys: pytest.CaptureFixture[str], *settings: str) -> str:
    config = load_config([*WORDS, *settings], check=False).config
    assert say_where(config, Path("main.py"), []) is None
    return capsys.readouterr().out


def test_it_says_where_page_and_viewer_will_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert PAGE == WRITTEN
    lines = said(capsys).splitlines()
    assert "  outputs/told/run/report.html" in lines
    assert "  outputs/told/run/viewer/index.html" in lines
    assert all(len(line) <= 80 for line in lines)


def test_no_viewer_is_promised_to_a_run_that_records_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = said(capsys, "records.keep_gib=0").splitlines()
    assert lines[1:] == ["  outputs/told/run/report.html"]


def test_a_run_without_a_page_says_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said(capsys, "trainer.logger=console") == ""
    monkeypatch.setenv(ATTEMPT, "2")
    assert said(capsys) == "", "the attempt before has said it"
