"""docs/tools.md, the sandbox's page: their files are tools, snippets print what they show."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from custom.envs.simple_game import SimpleGameEnvironment
from custom.tools import MultiTurnManager, get_parser, load_tools
from tests.conftest import PROJECT

PAGE = (PROJECT / "docs/tools.md").read_text()
PAGE += (PROJECT / "features/sandbox/README.md").read_text()
# A block of code and, where it stands right behind, what it prints.
BLOCKS = re.findall(r"(?ms)^```(?:python|yaml)\n(.*?)^```\n(?:\n((?:    [^\n]*\n)+))?", PAGE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the page's files in it."""
    for source, _ in BLOCKS:
        if name := re.match(r"# (\S+\.(?:py|yaml))\n", source):
            (tmp_path / name[1]).write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_snippets_print_what_the_page_shows(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    snippets = [
        (source, shown) for source, shown in BLOCKS if not re.match(r"# \S+\.(py|yaml)\n", source)
    ]
    assert len(snippets) == 2
    for source, shown in snippets:
        exec(source, {})
        said = capsys.readouterr().out
        # Which walls stand depends on the machine.
        if "walls" not in source:
            assert said == re.sub(r"(?m)^    ", "", shown)
    assert set(re.findall(r"'(\w+)': True", snippets[1][1])) < set(re.findall(r"'(\w+)':", said))
    monkeypatch.delitem(sys.modules, "mytools")


def test_its_files_are_tools(folder: Path) -> None:
    registry = load_tools(["mytools.py:Capital", "moves.py:Take", "verl_tools.yaml"])
    assert list(registry.tools) == ["capital", "take", "search"]
    assert registry.execute_tool("search", query="nim") == (True, "about nim")
    manager = MultiTurnManager(registry, get_parser("react"), SimpleGameEnvironment())
    manager.environment.reset(seed=1)
    manager.step('Action: take\nAction Input: {"stones": 2}')
    assert manager.summary().tool_statistics["take"] | {"seconds": 0} == {
        "calls": 1,
        "failures": 0,
        "seconds": 0,
    }
