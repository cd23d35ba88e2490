"""Every shipped config can be read, and those for a CPU pass their checks with their files made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.needed_features import require_features
from training.config.loader import ConfigError, load_config

CONFIGS = sorted((PROJECT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_has_known_keys_and_types(path: Path) -> None:
    try:
        load_config([str(path)], check=False)
    except ConfigError as error:
        # A file that is about a feature names its settings.
        absent = re.findall(r"features/(\w+), which is not here", " ".join(error.problems))
        if len(absent) == len(error.problems):
            require_features(*absent)
        raise


def test_the_gsm8k_configs_differ_in_the_algorithm_alone() -> None:
    grpo, ppo = (
        load_config([str(PROJECT / f"configs/gsm8k_{name}.yaml")], check=False).config
        for name in ("grpo", "ppo")
    )
    assert (grpo.algorithm.adv_estimator, grpo.need_critic, grpo.actor_rollout_ref.rollout.n) == (
        "grpo",
        False,
        8,
    )
    assert (ppo.algorithm.adv_estimator, ppo.need_critic, ppo.actor_rollout_ref.rollout.n) == (
        "gae",
        True,
        1,
    )
    assert grpo.data == ppo.data
    assert grpo.actor_rollout_ref.model == ppo.actor_rollout_ref.model


def test_the_agents_config_wants_an_environment_and_a_model_alone(
    tmp_path: Path, tiny_task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_env.py").write_text(
        "class MyEnv:\n"
        "    def reset(self, **row):\n        return 'say'\n\n"
        "    def step(self, action):\n        return 'said', 1.0, True\n"
    )
    base, vllm = str(PROJECT / "configs/agent.yaml"), "actor_rollout_ref.rollout.name=hf"
    lengths = [
        "data.max_prompt_length=32",
        "data.max_response_length=32",
        "agent.max_turn_tokens=8",
    ]
    given = ["agent.environment.path=my_env.py", "agent.environment.cls=MyEnv"]
    # The other loggers are a feature's.
    model = [f"actor_rollout_ref.model.path={tiny_task}/model", "trainer.logger=[console]"]
    config = load_config([base, vllm, *lengths, *given, *model]).config
    assert (config.algorithm.adv_estimator, config.environments[0].cls) == ("grpo", "MyEnv")
    assert load_config([base], check=False).config.data.row_length == 4096
    with pytest.raises(ConfigError) as caught:
        load_config([base, vllm])
    starts = [problem.split(":")[0] for problem in caught.value.problems]
    assert {"data.train_files is missing", "actor_rollout_ref.model.path is missing"} <= set(starts)


def test_the_quickstarts_configs_pass_every_check_on_the_tiny_task(tiny_task: Path) -> None:
    files = [
        f"data.train_files={tiny_task}/train.parquet",
        f"data.val_files={tiny_task}/val.parquet",
    ]
    for name in ("quickstart", "test_config"):
        load_config(
            [
                str(PROJECT / f"configs/{name}.yaml"),
                *files,
                f"actor_rollout_ref.model.path={tiny_task}/model",
                "trainer.logger=[console]",
            ]
        )
