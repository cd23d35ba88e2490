"""Runs whose environments, rewards and tools ask a model beside the policy."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from custom.confine import kill_tree
from custom.tools import MultiTurnManager, load_tools
from custom.tools.parsers import get_parser
from features.judges import Model, ModelError, ModelSettings, install_models
from tests.conftest import PROJECT
from tests.e2e.test_agents import AGENT, GAMES, GRPO, endings, facts_of, fit, game_config
from tests.e2e.test_training import read_steps, tiny_config
from tests.model_server import completion, hang, model_server, reply, say
from training.building import build_trainer
from training.config.loader import ConfigError
from training.run.abort_policy import EnvironmentsFail

PROGRAMS = PROJECT / "tests/features/programs/asks_judge.py"
PARTS = PROJECT / "tests/features/judges/runs/judged_parts.py"
# Not a try again, which would take its time.
JUDGE = ("judges.models.judge.model=m", "judges.models.judge.max_retries=0")


@pytest.fixture(autouse=True)
def no_models_stay() -> Iterator[None]:
    yield
    install_models({})


def asking(url: str, *overrides: str) -> tuple[str, ...]:
    return (f"judges.models.judge.base_url={url}", *JUDGE, *overrides)


def counts_of(metrics: dict[str, Any]) -> dict[str, float]:
    start = "agent/models/judge/"
    return {
        name.removeprefix(start): value for name, value in metrics.items() if name.startswith(start)
    }


def fails(first: int, last: int) -> Any:
    """Answers, but for requests of these numbers."""

    def answer(handler: Any, number: int) -> None:
        if first <= number < last:
            reply(handler, 500, b"down")
        else:
            reply(handler, content=completion("higher"))

    return answer


JUDGED = (*GRPO, f"{AGENT}.path={PARTS}", f"{AGENT}.cls=Judged", "agent.trial_episodes=0")


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_environments_ask_wherever_they_live_and_the_step_counts_it(
    tiny_game: Path, tmp_path: Path, isolation: str
) -> None:
    with model_server(say("higher")) as server:
        prices = ("judges.models.judge.price_in=1", "judges.models.judge.cache=never")
        config = game_config(
            tiny_game, tmp_path, *JUDGED, *asking(server.url, *prices),
            f"{AGENT}.isolation={isolation}",
        )  # fmt: skip
        fit(config)
        # One is the trial request.
        assert len(server.bodies) == 1 + 2 * 32
    for step in read_steps(tmp_path):
        counts = counts_of(step)
        assert (counts["calls"], counts["failures"], counts["retries"]) == (32, 0, 0)
        assert counts["prompt_tokens"] == 320
        assert counts["cost"] == pytest.approx(320 / 1e6)
        assert 0 < counts["seconds"] < 5
        assert endings(step) == {"done": 32}


def test_programs_ask_and_the_step_counts_it_without_their_trial(
    tiny_game: Path, tmp_path: Path
) -> None:
    with model_server(say("0.5")) as server:
        config = game_config(
            tiny_game, tmp_path, *GRPO, f"{AGENT}.path=null", f"{AGENT}.cls=null",
            f"programs.function={PROGRAMS}:solve", "trainer.total_training_steps=1",
            *asking(server.url, "judges.models.judge.cache=never"),
        )  # fmt: skip
        _, [batch] = fit(config)
        # The model's trial, the program's, and two of each episode.
        assert len(server.bodies) == 1 + 2 + 2 * 32
    [step] = read_steps(tmp_path)
    assert counts_of(step)["calls"] == 2 * 32
    counted = [facts["models"]["judge"]["calls"] for facts in facts_of(batch) if facts["models"]]
    assert sum(counted) == 2 * 32
    assert {facts["paid"] for facts in facts_of(batch)} == {1.0}


def test_a_model_that_is_down_for_a_while_costs_episodes_and_not_the_run(
    tiny_game: Path, tmp_path: Path
) -> None:
    with model_server(fails(10, 20)) as server:
        cache = ("judges.models.judge.cache=never", "agent.max_failure_rate=1")
        config = game_config(tiny_game, tmp_path, *JUDGED, *asking(server.url, *cache))
        _, batches = fit(config)
    first, second = read_steps(tmp_path)
    assert counts_of(first)["failures"] == 10
    assert first["agent/retries"] == 10
    assert endings(first) == endings(second) == {"done": 32}
    errors = [facts["error"] for facts in facts_of(batches[0]) if facts["error"]]
    assert errors and all("ModelError: model judge (m at " in error for error in errors)


def test_a_reward_function_whose_judge_is_down_fails_its_episode_and_not_the_run(
    tiny_game: Path, tmp_path: Path
) -> None:
    with model_server(fails(1, 10_000)) as server:
        config = game_config(
            tiny_game, tmp_path, *GRPO, f"{AGENT}.path={GAMES}", f"{AGENT}.cls=Even",
            f"custom_reward_function.path={PARTS}",
            "custom_reward_function.name=judged_trajectory",
            "agent.trial_episodes=0", "agent.on_failure=mask", "agent.max_failure_rate=1",
            *asking(server.url),
        )  # fmt: skip
        fit(config)
    for step in read_steps(tmp_path):
        assert endings(step) == {"env_crash": 32}
        assert step["agent/masked"] == 32


@pytest.mark.parametrize("manager", ["naive", "batch", "prime"])
def test_rows_without_a_score_are_left_out(tiny_task: Path, tmp_path: Path, manager: str) -> None:
    name = "compute_scores" if manager == "batch" else "compute_score"
    with model_server(fails(3, 8)) as server:
        config = tiny_config(
            tiny_task, tmp_path, *GRPO,
            f"custom_reward_function.path={PARTS}", f"custom_reward_function.name={name}",
            f"reward_model.reward_manager={manager}", "data.val_files=null",
            "trainer.total_training_steps=2",
            *asking(server.url, "judges.models.judge.cache=never"),
            "judges.models.judge.trial=false",
        )  # fmt: skip
        _, batches = fit(config)
    first, second = read_steps(tmp_path)
    unscored = first["agent/models/unscored_rows"]
    assert unscored == (len(batches[0].drop_dummies()) if manager == "batch" else unscored)
    assert unscored >= 1
    assert second["agent/models/unscored_rows"] == 0
    rows = batches[0].drop_dummies()
    is_unscored = [value is True for value in rows.non_tensor_batch["reward_info/unscored"]]
    lengths = rows.batch["response_mask"].sum(1).tolist()
    assert [length == 0 for length in lengths] == is_unscored


def test_rows_without_a_score_get_0_where_failures_do(tiny_task: Path, tmp_path: Path) -> None:
    with model_server(fails(3, 8)) as server:
        config = tiny_config(
            tiny_task, tmp_path, *GRPO, f"custom_reward_function.path={PARTS}",
            "data.val_files=null", "agent.on_failure=zero", "trainer.total_training_steps=1",
            *asking(server.url, "judges.models.judge.cache=never"),
            "judges.models.judge.trial=false",
        )  # fmt: skip
        _, (batch,) = fit(config)
    rows = batch.drop_dummies()
    unscored = [value is True for value in rows.non_tensor_batch["reward_info/unscored"]]
    assert any(unscored)
    assert not rows.batch["token_level_scores"][unscored].any()
    assert rows.batch["response_mask"].sum(1).all()


def test_a_greedy_baseline_without_a_score_leaves_its_group_out(
    tiny_task: Path, tmp_path: Path
) -> None:
    # Behind that of the reward function's trial come those of the eight greedy answers.
    with model_server(fails(2, 4)) as server:
        config = tiny_config(
            tiny_task, tmp_path, "algorithm.adv_estimator=remax",
            f"custom_reward_function.path={PARTS}", "data.val_files=null",
            "trainer.total_training_steps=1", "actor_rollout_ref.actor.ppo_epochs=1",
            *asking(server.url, "judges.models.judge.cache=never"),
            "judges.models.judge.trial=false",
        )  # fmt: skip
        _, (batch,) = fit(config)
    lengths = batch.drop_dummies().batch["response_mask"].sum(1).tolist()
    assert lengths.count(0) == 2


def test_a_judge_that_hangs_is_a_timeout_of_the_environment(
    tiny_game: Path, tmp_path: Path
) -> None:
    with model_server(hang) as server:
        config = game_config(
            tiny_game, tmp_path, *JUDGED,
            *asking(server.url, "judges.models.judge.trial=false"), "agent.step_timeout_s=1",
            "trainer.total_training_steps=1", "agent.max_failure_rate=1",
        )  # fmt: skip
        fit(config)
    (step,) = read_steps(tmp_path)
    assert endings(step) == {"env_timeout": 32}
    assert step["agent/episode_seconds/max"] < 20


def test_rows_without_a_score_are_counted_in_validation(tiny_task: Path, tmp_path: Path) -> None:
    # The first is the reward function's trial, which is in no metrics.
    with model_server(fails(1, 5)) as server:
        config = tiny_config(
            tiny_task, tmp_path, f"custom_reward_function.path={PARTS}", "trainer.val_only=true",
            *asking(server.url, "judges.models.judge.cache=never"),
            "judges.models.judge.trial=false",
        )  # fmt: skip
        trainer = build_trainer(config)
        metrics = trainer.fit()
        trainer.shutdown()
    (unscored,) = (value for name, value in metrics.items() if name.endswith("unscored/mean@1"))
    assert unscored == pytest.approx(4 / 16)
    assert metrics["val-aux/agent/models/judge/failures"] == 4


def test_a_judge_that_stays_down_ends_the_run_with_the_reason(
    tiny_task: Path, tmp_path: Path
) -> None:
    with model_server(fails(0, 10_000)) as server:
        config = tiny_config(
            tiny_task, tmp_path, *GRPO, f"custom_reward_function.path={PARTS}",
            "data.val_files=null", "trainer.total_training_steps=4",
            *asking(server.url, "judges.models.judge.trial=false"),
        )  # fmt: skip
        with pytest.raises(EnvironmentsFail, match="answers of the last three batches have no"):
            fit(config)
    assert len(read_steps(tmp_path)) == 2


def test_what_is_wrong_with_models_is_told_before_a_model_is_loaded(
    tiny_game: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}/v1"
    config = game_config(tiny_game, tmp_path, *JUDGED, *asking(url))
    with pytest.raises(
        ConfigError, match=r"judges\.models\.judge: model judge \(m at .*cannot be r"
    ):
        build_trainer(config)
    wrong = ("user.base_url=ftp://x", "user.key_env=NO_SUCH_KEY", "opponent.base_url=http://a:b@c")
    with pytest.raises(ConfigError) as error:
        game_config(tiny_game, tmp_path, *(f"judges.models.{word}" for word in wrong))
    text = str(error.value)
    assert "judges.models.user.base_url=ftp://x is no URL of a server" in text
    assert "judges.models.user.model is empty" in text
    assert "judges.models.user.key_env=NO_SUCH_KEY is the name of an environment variable" in text
    assert "judges.models.opponent.base_url has a user or password in it" in text
    assert "a:b" not in text
    with pytest.raises(ConfigError, match=r"there is no such key\. Did you mean 'timeout_s"):
        game_config(tiny_game, tmp_path, *asking(url, "judges.models.judge.timeout=3"))
    # Started again by itself, a run does not end for it.
    monkeypatch.setenv("PPO_CORE_ATTEMPT", "2")


def test_a_tools_model_that_is_down_is_an_error_of_the_call() -> None:
    settings = {"name": "judge", "model": "m", "max_retries": 0, "timeout_s": 0.5}
    with model_server(fails(0, 1)) as server:
        install_models({"judge": ModelSettings(base_url=server.url, **settings)})
        manager = MultiTurnManager(load_tools([f"{PARTS}:Oracle"]), get_parser("json"))
        failed, answered = (manager.step('{"name": "oracle", "arguments": {}}') for _ in range(2))
    assert failed.tool_call.error_kind == "exception"
    assert answered.observation == "higher"


@pytest.mark.slow
@pytest.mark.vllm
def test_a_real_vllm_server_judges(tiny_game: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model",
        str(tiny_game / "model"), "--served-model-name", "tiny", "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--max-model-len", "64", "--enforce-eager",
    ]  # fmt: skip
    log = (tmp_path / "server.log").open("w")
    server = subprocess.Popen(
        command, stdout=log, stderr=log, start_new_session=True,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and server.poll() is None:
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        config = game_config(
            tiny_game, tmp_path / "run", *JUDGED, "trainer.total_training_steps=1",
            f"judges.models.judge.base_url={url}/v1", "judges.models.judge.model=tiny",
        )  # fmt: skip
        fit(config)
        unknown = ModelSettings(name="judge", base_url=f"{url}/v1", model="other")
        with pytest.raises(ModelError, match=r"404.*other"):
            Model(unknown).ask("?")
    finally:
        kill_tree(server.pid)
        server.wait()
        log.close()
    (step,) = read_steps(tmp_path / "run")
    counts = counts_of(step)
    assert counts["failures"] == 0
    assert counts["calls"] + counts["cached"] == 32
    assert counts["prompt_tokens"] > counts["completion_tokens"] > 0
