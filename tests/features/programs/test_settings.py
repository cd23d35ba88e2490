"""Tests the checks of programs' settings."""

from __future__ import annotations

import pytest

from tests.unit.config.helpers import checked


@pytest.mark.parametrize("played", ["programs.command=[ls]", "env_template=[{command: [ls]}]"])
def test_programs_with_rows_are_validated_with_rows(played: str, runnable: list[str]) -> None:
    without_rows = [*runnable, played, "data.val_files=[]"]
    (problem,) = checked(without_rows, "agent.val_length=32")
    assert problem.startswith("agent.val_length=32 validates a program without a task (TASK={})")
    assert "give data.val_files, or agent.val_length=0" in problem
    # No validation, rows for it, and tasks that the program draws from its seed.
    assert checked(without_rows, "agent.val_length=0") == []
    assert checked(runnable, played, "agent.val_length=32") == []
    assert checked(without_rows, "data.train_files=[]", "agent.val_length=32") == []
