"""Tests what is told of a config: --explain and the reference of all keys."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from tests.conftest import PROJECT
from training.config import PPOConfig
from training.config.explain import explain, explain_run
from training.config.leaves import leaves
from training.config.loader import ConfigError, load_config
from training.config.reference import reference_yaml
from training.features import absent_features


@pytest.mark.seconds
def test_explain_says_where_each_value_came_from(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: {seed: 5}\n")
    loaded = load_config(
        [str(tmp_path / "run.yaml"), "--explain", "trainer.logger=[file]"], check=False
    )
    assert loaded.explain
    lines = {line.split()[0]: line.split()[1:] for line in explain(loaded).splitlines()}
    assert lines["data.seed"] == ["5", "run.yaml", "data/epoch_order.py"]
    assert lines["trainer.logger"][:3] == ["[file]", "command", "line"]
    assert lines["critic.optim.lr"] == ["1e-05", "default", "workers/model/optimizer.py"]
    assert len(lines) == len(list(leaves(PPOConfig())))


@pytest.mark.seconds
def test_explain_shows_first_what_was_given_and_counts_the_rest(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: {seed: 5, train_batch_size: 1024}\n")
    argv = [str(tmp_path / "run.yaml"), "trainer.logger=[file]"]
    lines = explain_run(load_config([*argv, "--explain"], check=False)).splitlines()
    others = len(list(leaves(PPOConfig()))) - 3
    assert [line.split() for line in lines[:5]] == [
        ["data.train_batch_size", "1024", "run.yaml"],
        ["data.seed", "5", "run.yaml"],
        ["trainer.logger", "[file]", "command", "line"],
        f"{others} other settings are at their defaults: --explain-all lists them too".split(),
        [],
    ]
    every = explain_run(load_config([*argv, "--explain-all"], check=False)).splitlines()
    assert len(every) == len(lines) - 4 + others + 3


def test_explain_asks_no_hub(
    runnable: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(
        transformers.PretrainedConfig, "get_config_dict", lambda _: pytest.fail("it asked the hub")
    )
    hub = [*runnable, "actor_rollout_ref.model.path=org/name", "--explain"]
    assert load_config(hub).explain
    assert "actor_rollout_ref.model.path=org/name is no folder here: left unchecked" in caplog.text
    with pytest.raises(ConfigError, match="cannot be a hub name"):
        load_config([*hub, "actor_rollout_ref.model.path=./no/such/folder"])


IMPORTED = """
import sys
from training.config.loader import load_config

load_config(sys.argv[1:])
print(*sorted({"torch", "tensordict", "transformers"} & sys.modules.keys()))
"""


@pytest.mark.seconds
def test_explaining_a_config_imports_neither_torch_nor_transformers(runnable: list[str]) -> None:
    model, hf = runnable[0], runnable[3]
    argv = [model, hf, "agent.environment.name=custom.envs.guess_number:GuessNumber", "--explain"]
    run = subprocess.run(
        [sys.executable, "-c", IMPORTED, *argv],
        cwd=PROJECT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1] == ""


def test_the_reference_yaml_is_in_step_and_holds_the_defaults() -> None:
    written = (PROJECT / "configs/ppo_trainer.yaml").read_text()
    sections = re.split(r"(?m)^(?=\w+:)", written)
    # Those of features whose folders were deleted may stay in the file.
    left = [part for part in sections if part.partition(":")[0] not in absent_features()]
    assert "".join(left) == reference_yaml(), (
        "run: python -m training.config.reference > configs/ppo_trainer.yaml"
    )
    loaded = load_config([str(PROJECT / "configs/ppo_trainer.yaml")], check=False)
    assert loaded.config == PPOConfig()
    assert set(loaded.sources.values()) == {"ppo_trainer.yaml"}
