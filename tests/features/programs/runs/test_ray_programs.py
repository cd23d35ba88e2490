"""Programs, the models beside the policy and MCP's tools where Ray places the ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.e2e.test_agents import endings, facts_of, fit
from tests.e2e.test_training import read_steps
from tests.features.programs.runs.test_programs import NO_ENVIRONMENT
from tests.model_server import model_server, say

ray = pytest.importorskip("ray")
mcp_runs = pytest.importorskip("tests.features.mcp.runs.test_mcp_runs")
pytest.importorskip("features.judges.feature")
HERE = Path(__file__).parent


def test_ranks_play_programs_that_ask_a_judge_beside_tools_of_an_mcp_server(
    cluster: None, tiny_game: Path, tmp_path: Path
) -> None:
    """Each rank has a server of its own, at its node's address."""
    entries = (
        f"{{program: '{HERE.parent}/asks_judge.py:solve'}}",
        f"{{command: [{sys.executable}, {HERE}/programs/on_ray.py]}}",
        "{path: examples/quickstart_game.py, cls: TerseGuessNumber}",
    )
    with model_server(say("0.5")) as judge:
        config = mcp_runs.mcp_config(
            tiny_game, tmp_path, "counter",
            *NO_ENVIRONMENT, f"env_template=[{', '.join(entries)}]",
            "agent.agent_length=6", "actor_rollout_ref.actor.ppo_mini_batch_size=6",
            "programs.host=node", f"judges.models.judge.base_url={judge.url}",
            "judges.models.judge.model=m", "judges.models.judge.cache=never",
            "trainer.launcher=ray", "trainer.n_gpus_per_node=2",
            "trainer.total_training_steps=1",
        )  # fmt: skip
        _, [batch] = fit(config)
        # The model's trial, those of the programs, and the episodes'.
        assert len(judge.bodies) == 1 + 3 + 4 * 3
    [step] = read_steps(tmp_path)
    assert endings(step) == {"done": 8, "max_turns": 4}
    assert step["agent/models/judge/calls"] == 4 * 3
    assert (step["tool/add/calls"], step["tool/add/failures"]) == (8, 0)
    told = [entry["info"] for entry in facts_of(batch) if "port" in entry["info"]]
    assert len({info["port"] for info in told}) == 2
    host = ray.util.get_node_ip_address()
    assert {bool(info["is_loopback"]) for info in told} == {host.startswith("127.")}
