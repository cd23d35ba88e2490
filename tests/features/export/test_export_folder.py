"""An export's folder is never left half."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cases import fast_and_long
from tests.unit.test_folders_in_the_making import assert_a_signal_leaves_nothing

SETTING_UP = """
from features.export import export as module
module.export = lambda checkpoint, out, **options: making(out)
"""


@pytest.mark.seconds
@pytest.mark.parametrize(
    "number",
    fast_and_long([signal.SIGTERM, signal.SIGHUP, signal.SIGINT], fast=[signal.SIGTERM]),
)
def test_a_signal_that_ends_an_export_leaves_nothing_half(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "run").mkdir()
    assert_a_signal_leaves_nothing(tmp_path, SETTING_UP, [str(tmp_path / "run"), "OUT"], number)
