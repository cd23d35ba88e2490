"""docs/tools.md, the sandbox's page: their files are tools, snippets print what they show."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from custom.agent import Agent, AgentSpec
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


def play(agent: Agent, seed: int, query: str) -> tuple[str, float]:
    """Has an agent ask the database, and answer what that said; returns both."""
    [question] = [message["content"] for message in agent.reset(seed)]
    name = question.split()[3]
    asked = agent.step(f"Action: sql\nAction Input: {query.format(name)}")
    [reply] = asked.observation
    assert asked.info["tool_calls"][0]["ok"] and not asked.done
    answered = agent.step(reply["content"].strip("[]"))
    assert answered.done
    return reply["content"], answered.reward


def test_a_tool_asks_the_environment_of_its_own_episode(folder: Path) -> None:
    spec = AgentSpec("ages.py:Ages", tools=("ages.py:Sql",), parser="react")
    agents = [spec.build() for _ in range(2)]
    query = "select age from people where name = '{}'"
    for agent, seed in zip(agents * 3, range(6), strict=True):
        assert play(agent, seed, query) == (f"[[{agent.environment.age}]]", 1.0)
    for agent in agents:
        agent.close()


@pytest.mark.long
def test_the_pages_game_with_a_database_trains(folder: Path) -> None:
    for command in (
        ["examples/prepare_game.py", "ages.yaml"],
        ["main.py", "ages.yaml", "trainer.total_training_steps=1", "trainer.logger=file"],
    ):
        program = [sys.executable, str(PROJECT / command[0]), *command[1:]]
        done = subprocess.run(program, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
        assert "no game called" not in done.stdout
    [metrics] = [
        json.loads(line)
        for line in (folder / "outputs/ages/run/metrics.jsonl").read_text().splitlines()
        if "tool/sql/calls" in line
    ]
    assert metrics["tool/sql/calls"] > 0
