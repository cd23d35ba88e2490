"""Runs with tools from MCP servers, and in environments of OpenEnv's form."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PROJECT
from tests.e2e.test_agents import AGENT, GRPO, endings, facts_of, fit, game_config
from tests.e2e.test_training import read_steps
from tests.features.adapters.test_openenv import observed, openenv_like
from tests.features.mcp.test_mcp import servers_alive
from training.building import build_trainer
from training.config import PPOConfig
from training.config.loader import ConfigError

SERVERS = PROJECT / "tests/mcp_servers.py"
CALLER = PROJECT / "tests/features/programs/runs/calling_agent.py"
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


def test_a_run_plays_a_server_of_openenvs_form(tiny_game: Path, tmp_path: Path) -> None:
    def answer(message: dict[str, object]) -> str | None:
        if message["type"] == "close":
            return None
        is_step = message["type"] == "step"
        return observed("guess", 0.5 if is_step else None, is_step)

    with openenv_like(answer) as (url, messages):
        config = game_config(
            tiny_game, tmp_path, *GRPO, *FEW, f"{AGENT}.path=null", f"{AGENT}.cls=null",
            f"{AGENT}.name=openenv:{url}", f"{AGENT}.prompt_template='{{observation}}'",
            "agent.trial_episodes=0",
        )  # fmt: skip
        fit(config)
    for step in read_steps(tmp_path):
        assert endings(step) == {"done": 8}
        assert step["critic/score/mean"] == 0.5
    assert sum(message["type"] == "step" for message in messages) == 16


DEADLINE_S = 2.0
WORDS = "word " * 300_000


class Server:
    """A server of OpenEnv's form, which plays well in the run's trial, its first reset."""

    def __init__(self, reset: Any, step: Any, sleep_s: float = 0.0) -> None:
        self.replies = {"reset": reset, "step": step}
        self.sleep_s = sleep_s
        self.resets = 0

    def answer(self, message: dict[str, Any]) -> Any:
        self.resets += message["type"] == "reset"
        if self.resets <= 1:
            return {"reset": observed("guess")}.get(message["type"])
        time.sleep(self.sleep_s)
        return self.replies.get(message["type"])


# Each with the ending of its episodes.
WAYS = {
    "well": (Server(observed("guess"), observed("over", 0.5, True)), "done"),
    "huge_observation": (Server(observed("guess"), observed(WORDS)), "overflow"),
    "huge_reset": (Server(observed(WORDS), observed()), "overflow"),
    "slow_reset": (Server(observed("guess"), observed(), 2 * DEADLINE_S), "env_timeout"),
    "closes_in_reset": (Server(None, None), "env_crash"),
    "closes_in_a_step": (Server(observed("guess"), None), "env_crash"),
    "no_json": (Server(observed("guess"), "<html>502</html>"), "env_crash"),
    "bytes": (Server(observed("guess"), b"\x00\xff"), "env_crash"),
    "no_number": (Server(observed("guess"), observed("x", math.nan)), "env_crash"),
    "infinite": (Server(observed("guess"), observed("x", math.inf, True)), "env_crash"),
    "ends_at_once": (Server(observed("guess", 1.0, True), None), "env_crash"),
}


def test_hostile_servers_cost_their_episodes_and_are_counted(
    tiny_game: Path, tmp_path: Path
) -> None:
    with ExitStack() as servers:
        urls = [servers.enter_context(openenv_like(way.answer))[0] for way, _ in WAYS.values()]
        entries = ", ".join(
            f"{{name: 'openenv:{url}', prompt_template: '{{observation}}'}}" for url in urls
        )
        config = game_config(
            tiny_game, tmp_path, *GRPO,
            f"{AGENT}.path=null", f"{AGENT}.cls=null", f"env_template=[{entries}]",
            f"agent.agent_length={len(WAYS)}", "actor_rollout_ref.rollout.n=2",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={len(WAYS)}",
            f"agent.step_timeout_s={DEADLINE_S}", "agent.on_failure=mask",
            "agent.max_failure_rate=1", "agent.max_refills=0", "agent.trial_episodes=0",
            "trainer.total_training_steps=1", "trainer.val_before_train=false",
        )  # fmt: skip
        _, [batch] = fit(config)
    [step] = read_steps(tmp_path)
    names = list(WAYS)
    facts = facts_of(batch)
    seen = Counter((names[entry["environment"]], entry["ending"]) for entry in facts)
    assert seen == {(way, ending): 2 for way, (_, ending) in WAYS.items()}
    assert endings(step) == Counter(entry["ending"] for entry in facts)
    masked = {names[entry["environment"]] for entry in facts if entry["masked"]}
    failed = {way for way, (_, ending) in WAYS.items() if ending.startswith("env_")}
    # Nothing was sampled behind a first prompt without room.
    assert masked == failed | {"huge_reset"}
    assert step["agent/masked"] == 2 * len(masked)
    assert all(math.isfinite(value) for value in step.values())
