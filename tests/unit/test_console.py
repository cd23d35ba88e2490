"""The console's line of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.config import PPOConfig
from training.observers import ObservedRun
from training.run.console import CONSOLE_COLUMNS, ConsoleLine, format_line, wrapped


def make_run(total_steps: int | None = None) -> ObservedRun:
    return ObservedRun(config=PPOConfig(), run_dir=Path(), total_steps=total_steps)


def test_one_aligned_line_is_printed_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run()
    line = ConsoleLine(run)
    for step, reward in ((1, 0.25), (120, -0.5)):
        run.step = step
        line.step_logged(
            {"perf/time_per_step": 11.25, "critic/score/mean": reward, "unknown/metric": 1.0}
        )
    first, second = capsys.readouterr().out.splitlines()
    assert first == "step     1 | reward  0.2500 | s/step   11.2"
    assert second == "step   120 | reward -0.5000 | s/step   11.2"


def test_validation_rewards_are_shown() -> None:
    name = "val-core/gsm8k/reward/mean@1"
    assert format_line({name: 0.5}, 0) == "step     0 | gsm8k/reward/mean@1 0.5000"
    sure = {name: 0.5, f"{name}/ci_low": 0.41, f"{name}/ci_high": 0.589, f"{name}/tasks": 90.0}
    assert format_line(sure, 0) == "step     0 | gsm8k/reward/mean@1 0.5000 [0.410, 0.589]"


def test_progress_and_the_time_left_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([90.0, 100.0, 110.0])
    monkeypatch.setattr("training.run.console.time.monotonic", lambda: next(clock))
    run = make_run(total_steps=6)
    line = ConsoleLine(run)
    line.run_started(1, [])
    run.step = 3
    line.step_logged({"critic/score/mean": 0.5})
    assert capsys.readouterr().out == "step     3/6 | reward  0.5000 | left 0:00:15\n"


def test_a_step_that_is_wider_than_the_terminal_goes_on_below() -> None:
    data = {name: 0.5 for name, _ in CONSOLE_COLUMNS.values()}
    line = format_line(data, 3, 60)
    assert len(line) > 100
    for width in (80, 60, 40):
        lines = wrapped(line, width).split("\n")
        assert all(len(part) <= width for part in lines) and len(lines) > 1
        assert " | ".join(part.strip() for part in lines) == line
        assert all(part.startswith("    ") for part in lines[1:])
    assert wrapped(line, None) == wrapped(line, len(line)) == line


def test_what_a_teacher_says_and_what_was_left_out_are_shown_where_they_are() -> None:
    metrics = {"critic/score/mean": 0.5, "teacher/kl": 1.25, "policy_calls/refused": 3.0}
    line = format_line(metrics, 1, 2)
    assert "| kl to teacher  1.2500 | questions refused 3" in line
    assert "refused" not in format_line(metrics | {"policy_calls/refused": 0.0}, 1, 2)
