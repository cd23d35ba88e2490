"""A user's file that ends the program as it is loaded is told, and ends nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from data.loading import load_extern_object, load_object

EXITS = "import sys\n\n\ndef score(**_):\n    return 1.0\n\n\nsys.exit({code})\n"


@pytest.mark.parametrize("code", ["", "0", "3", "'done'"])
def test_a_file_that_exits_is_told_by_its_name(tmp_path: Path, code: str) -> None:
    """A run ended with exit code 0 before its first step, and nothing was said."""
    path = tmp_path / "mine.py"
    path.write_text(EXITS.format(code=code))
    with pytest.raises(ValueError, match=r"mine\.py' ends the program as it is loaded"):
        load_extern_object(str(path), "score")
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    assert str(path) not in files


def test_a_module_that_exits_is_told_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_that_exits.py").write_text(EXITS.format(code=""))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="the module ends the program as it is imported"):
        load_object("module_that_exits:score", "a setting")
