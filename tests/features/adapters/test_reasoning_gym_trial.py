"""The trial before a run says what reasoning-gym's games pay."""

from __future__ import annotations

import pytest

from custom.env_factory import make_environment
from tests.unit.test_trial import said


def test_reasoning_gyms_rush_hour_pays_every_answer_alike(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("reasoning_gym")
    text = said(caplog, make_environment("reasoning_gym:rush_hour"))
    assert "WARNING Marathon paid 0.01 for each random answer, and as much for" in text
