"""Runs in environments of OpenEnv's form."""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.e2e.test_agents import AGENT, GRPO, endings, facts_of, fit, game_config
from tests.e2e.test_training import read_steps
from tests.features.adapters.test_openenv import observed, openenv_like

FEW = ("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2")


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
