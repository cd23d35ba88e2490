"""Files that import from verl are told where its names are here."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from data.loading import load_extern_object
from data.verl_modules import HERE, module_here


@pytest.mark.parametrize("module", sorted(set(HERE.values())))
def test_the_modules_are_there(module: str) -> None:
    assert importlib.import_module(module).__doc__


def test_the_longest_known_part_decides() -> None:
    assert module_here("verl.tools.base_tool") == "custom.tools.verl_tools"
    assert module_here("verl.workers.rollout.vllm_rollout") == "workers.rollout.base_rollout"
    assert module_here("verl.experimental.x") == "data.protocol"


@pytest.mark.parametrize(
    "line",
    ["from verl.tools.schemas import ToolResponse", "import verl.tools.base_tool as base"],
)
def test_a_file_that_imports_verl_is_told_the_module_here(tmp_path: Path, line: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import json\n{line}\n")
    with pytest.raises(ValueError, match=r"mine\.py:2 imports verl\.tools.* from custom\.tools"):
        load_extern_object(str(file), "Search")


def test_other_imports_that_fail_keep_their_error(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import verlet_of_nobody\n")
    with pytest.raises(ModuleNotFoundError, match="verlet_of_nobody"):
        load_extern_object(str(file), "Search")
