"""The small Python API: its config, and the scripts of its guide with a tiny model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from setup import ConfigStore, RayPPOTrainer, SimpleGameEnvironment
from tests.conftest import PROJECT
from tests.e2e.setup_parts import make_config
from tests.e2e.test_docs import TINY
from training.agent_trainer import AgentTrainer
from training.building import build_trainer
from training.config import PPOConfig
from training.config.loader import ConfigError, load_config

GUIDE = (PROJECT / "docs/python.md").read_text()
SCRIPTS = re.findall(r"```python\n(.*?)```", GUIDE, re.S)


@pytest.fixture
def config(tiny_game: Path, tmp_path: Path) -> ConfigStore:
    return make_config(tiny_game, tmp_path)


# Configuration


def test_a_misspelt_field_names_the_nearest_and_a_new_store_needs_nothing() -> None:
    store = ConfigStore()
    with pytest.raises(AttributeError, match="learning_rate"):
        store.training.learning_rat = 1.0  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="training"):
        store.trainin = 1  # type: ignore[attr-defined]
    assert isinstance(store.to_omegaconf().trainer.total_epochs, int)
    with pytest.raises(ConfigError, match=r"config\.model\.model_name"):
        RayPPOTrainer(store, SimpleGameEnvironment()).fit()


def test_a_group_estimator_has_groups_by_itself() -> None:
    store = ConfigStore()
    samples = {}
    for name in ("grpo", "gae", "rloo", "remax"):
        store.training.adv_estimator = name
        samples[name] = store.settings()["actor_rollout_ref.rollout.n"]
    assert samples == {"grpo": 8, "gae": 1, "rloo": 8, "remax": 1}


@pytest.mark.long
def test_what_is_saved_runs_by_main_and_is_read_back(config: ConfigStore, tmp_path: Path) -> None:
    config.training.num_epochs = 1
    config.overrides["alarms.mode"] = "off"
    RayPPOTrainer(config, SimpleGameEnvironment())
    saved = tmp_path / "saved.yaml"
    config.save(saved)

    read_back = ConfigStore.load(saved).settings()
    for key, value in config.settings().items():
        if key != "trainer.logger":
            assert str(read_back[key]) == str(value)

    typed = load_config([str(saved)], check=False).config
    assert typed.agent.environment.cls == "SimpleGameEnvironment"
    assert typed.trainer.total_training_steps == 2
    assert load_config([str(saved)]).config == typed

    again = tmp_path / "again.yaml"
    ConfigStore.of(typed).save(again)
    assert yaml.safe_load(again.read_text()) == yaml.safe_load(saved.read_text())

    command = [sys.executable, str(PROJECT / "main.py"), str(saved)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/global_step_2").is_dir()


def test_what_has_no_import_path_is_named_and_refused(config: ConfigStore, tmp_path: Path) -> None:
    class Local(SimpleGameEnvironment):
        pass

    RayPPOTrainer(config, Local(), reward_fn=lambda trajectory: 1.0)
    config.save(tmp_path / "saved.yaml")
    first, second, *_ = (tmp_path / "saved.yaml").read_text().splitlines()
    assert "environment has no import path" in first
    assert "Local" in first
    assert "reward_fn" in second
    with pytest.raises(ConfigError, match=r"agent.environment.name=given stands for an object"):
        load_config([str(tmp_path / "saved.yaml")])


def test_trainers_take_an_omegaconf_and_a_mapping(config: ConfigStore, tiny_game: Path) -> None:
    def agent_cls() -> None:
        """Stands for an agent that is never made."""

    omegaconf = config.to_omegaconf()
    trainers = [
        build_trainer(omegaconf, agent_cls=agent_cls),
        build_trainer(OmegaConf.to_container(omegaconf), agent_cls=agent_cls),
    ]
    trainers.append(AgentTrainer(omegaconf, trainers[0].tokenizer, agent_cls=agent_cls))
    assert all(isinstance(trainer, AgentTrainer) for trainer in trainers)
    assert all(isinstance(trainer.config, PPOConfig) for trainer in trainers)
    assert trainers[0].config == trainers[1].config == trainers[2].config
    misspelt = {"actor_rollout_ref": {"actor": {"optim": {"learning_rate": 1}}}}
    with pytest.raises(ConfigError, match="learning_rate"):
        build_trainer(misspelt, agent_cls=agent_cls)


# The package and its guide


def test_the_package_is_importable_from_any_folder(tmp_path: Path) -> None:
    """After `pip install -e .`, here by uv, with the dependencies of this environment."""
    uv = Path(sys.executable).parent / "uv"
    if not uv.exists():
        pytest.skip("uv is not installed")
    venv = tmp_path / "venv"
    python = venv / "bin/python"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, venv], check=True)
    install = [uv, "pip", "install", "--quiet", "--python", python, "--no-deps", "-e", PROJECT]
    subprocess.run(install, check=True)
    code = "import setup, training, workers, data, custom; print(setup.__file__)"
    paths = {"PYTHONPATH": sysconfig.get_paths()["purelib"]}
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=paths, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(PROJECT / "setup/__init__.py"), done.stderr


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_a_script_of_the_guide_runs_as_it_stands(
    number: int, tiny_game: Path, tmp_path: Path
) -> None:
    script = SCRIPTS[number].replace("outputs/quickstart/task/model", str(tiny_game / "model"))
    quickstart = '"configs/quickstart.yaml", '
    script = script.replace(quickstart, f"{quickstart}{tiny_overrides(tiny_game, tmp_path)}, ")
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def tiny_overrides(game: Path, folder: Path) -> str:
    """Writes the overrides that make the quickstart's config small, as items of a list."""
    overrides = [
        f"actor_rollout_ref.model.path={game / 'model'}",
        f"trainer.default_local_dir={folder / 'run'}",
        *TINY,
    ]
    return ", ".join(map(repr, overrides))
