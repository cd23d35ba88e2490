"""Model files that import torchvision for pictures are imported without it, for text."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from workers.rollout import absent_torchvision
from workers.rollout.absent_torchvision import empty_torchvision

MODULE = """
import torchvision_of_the_test.io
from torchvision_of_the_test.transforms.v2 import functional, InterpolationMode

class Model:
    mode = InterpolationMode.BICUBIC
"""


def test_a_file_is_imported_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "torchvision_of_the_test"
    monkeypatch.setattr(absent_torchvision, "NAME", name)
    (tmp_path / "sees_and_reads.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    with empty_torchvision():
        import sees_and_reads  # type: ignore[import-not-found]
    assert sees_and_reads.Model.mode is None
    assert sys.meta_path == before
    assert not [each for each in sys.modules if each.startswith(name)]
    with pytest.raises(ModuleNotFoundError):
        __import__(name)
