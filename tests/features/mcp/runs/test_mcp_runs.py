"""Runs with tools from MCP servers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.e2e.test_agents import AGENT, GRPO, endings, fit, game_config
from tests.e2e.test_training import read_steps
from tests.features.mcp.test_mcp import servers_alive
from training.building import build_trainer
from training.config import PPOConfig
from training.config.loader import ConfigError

SERVERS = PROJECT / "tests/mcp_servers.py"
CALLER = Path(__file__).with_name("calling_agent.py")
FEW = ("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2")


def mcp_config(game: Path, run_dir: Path, kind: str, *overrides: str) -> PPOConfig:
    server = f"mcp.servers.{kind}"
    return game_config(
        game, run_dir, *GRPO, *FEW,
        f"agent.cls.path={CALLER}", "agent.cls.name=Caller", "agent.parser=json",
        "agent.max_turn=2", "agent.trial_episodes=0", "actor_rollout_ref.rollout.n=2",
        "data.max_prompt_length=96", "data.max_response_length=96",
        f"{server}.command={sys.executable}", f"{server}.args=[{SERVERS}, {kind}]",
        *overrides,
    )  # fmt: skip


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_run_calls_a_servers_tools_and_leaves_no_server(
    tiny_game: Path, tmp_path: Path, isolation: str
) -> None:
    episodes = tmp_path / "episodes"
    config = mcp_config(
        tiny_game, tmp_path, "counter",
        f"{AGENT}.isolation={isolation}", f"records.folder={episodes}",
    )  # fmt: skip
    fit(config)
    for step in read_steps(tmp_path):
        assert endings(step) == {"max_turns": 4}
        assert step["tool/add/calls"] == 8
        assert step["tool/add/failures"] == 0
    # Every episode begins with a server of its own, which counts from 0.
    text = "".join(file.read_text() for file in sorted(episodes.glob("*.jsonl")))
    counted = [
        [turn["observation"][0]["content"].split()[0] for turn in record["turns"]]
        for record in map(json.loads, text.splitlines())
        if "turns" in record
    ]
    assert counted == [["1", "2"]] * 8
    assert servers_alive() == []


def test_a_server_that_dies_in_calls_costs_the_calls_and_not_the_run(
    tiny_game: Path, tmp_path: Path
) -> None:
    fit(mcp_config(tiny_game, tmp_path, "dies_in_calls"))
    for step in read_steps(tmp_path):
        assert endings(step) == {"max_turns": 4}
        assert step["tool/act/failures"] == step["tool/act/calls"] == 8
        assert step["tool_failures/exception"] == 8
    assert servers_alive() == []


def test_what_is_wrong_with_servers_is_told_before_a_model_is_loaded(
    tiny_game: Path, tmp_path: Path
) -> None:
    config = mcp_config(tiny_game, tmp_path, "exits")
    with pytest.raises(ConfigError, match="MCP server exits does not start"):
        build_trainer(config).init_workers()
    wrong = ("a.command=no-such-program", "b.url=http://me:secret@x", "c.env_from=[NO_SUCH]")
    with pytest.raises(ConfigError) as error:
        game_config(tiny_game, tmp_path, *(f"mcp.servers.{word}" for word in wrong))
    text = str(error.value)
    assert "mcp.servers.a.command=no-such-program: there is no such program here" in text
    assert "mcp.servers.b.url has a user or password in it" in text
    assert "mcp.servers.c: give command, of a process, or url" in text
    assert "mcp.servers.c: NO_SUCH is to be the name of an environment variable" in text
    assert "secret" not in text
