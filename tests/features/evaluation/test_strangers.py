"""A stranger's run is evaluated without running what it brings, unless somebody asks for that."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from features.evaluation.command import require_in_run
from features.evaluation.command_line import evaluate_command
from features.evaluation.evaluated_model import _peft_folder, _with_recorded
from features.evaluation.words import read_words
from scripts import replay
from tests.conftest import PROJECT
from training.config import ModelConfig
from training.config.found_config import require_no_code
from training.config.loader import ConfigError, load_config
from training.run.named_model import CannotUse
from training.run.signals import EndingSignals

RECORD: dict[str, Any] = {
    "path": "/stranger/model",
    "lora_rank": 4,
    "lora_alpha": 8,
    "target_modules": ["all-linear"],
    "override_config": {},
    "trust_remote_code": True,
}
# What a config.yaml may ask for, and what runs then.
CODE = (
    "actor_rollout_ref: {model: {trust_remote_code: true}}",
    "actor_rollout_ref: {model: {override_config: {attn_implementation: stranger/kernels}}}",
    "actor_rollout_ref: {rollout: {engine_kwargs: {vllm: {worker_cls: evil.Worker}}}}",
    "actor_rollout_ref: {rollout: {name: 'evil.py:Engine'}}",
    "custom_reward_function: {path: evil.py}",
    "custom_algorithm: evil.py",
    "data: {custom_cls: {path: evil.py, name: Data}}",
    "agent: {environment: {name: 'subprocess:Popen', kwargs: {args: [touch, x]}}}",
    "agent: {environment: {path: evil.py, cls: Game}}",
    "agent: {tools: ['evil.py:tool']}",
    "programs: {command: touch x}",
    "mcp: {servers: {evil: {command: touch x}}}",
    "reward_model: {model: {trust_remote_code: true}}",
    "trainer: {observers: ['evil.py:Observer']}",
    "trackers: {python: /stranger/python}",
)


def write_run(folder: Path, text: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(text)
    return ["--eval", str(folder)]


@pytest.mark.parametrize("text", CODE)
def test_code_that_a_found_config_asks_for_is_refused(text: str, tmp_path: Path) -> None:
    wanted = read_words(write_run(tmp_path, text))
    assert wanted.is_found
    loaded = load_config(list(wanted.words), check=False)
    with pytest.raises(ConfigError, match="nobody has named that file"):
        require_no_code(loaded, wanted.words[0], "main.py")


def test_the_whole_command_that_names_a_found_config_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", "agent: {environment: {path: count.py, cls: Count}}")
    with pytest.raises(ConfigError) as caught:
        evaluate_command(["--eval", "run", "--n", "2"], EndingSignals())
    (problem,) = caught.value.problems
    assert problem.endswith(": python main.py run/config.yaml --eval run --n 2")


def test_an_evaluation_s_words_are_read_without_torch() -> None:
    code = "import features.evaluation.command_line, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=False).returncode == 0


def test_files_of_this_project_may_be_asked_for_and_files_of_outputs_may_not(
    tmp_path: Path,
) -> None:
    own = "{environment: {path: %s/quickstart_game.py, cls: TerseGuessNumber}}"
    wanted = read_words(write_run(tmp_path, "agent: " + own % (PROJECT / "examples")))
    require_no_code(load_config(list(wanted.words), check=False), wanted.words[0], "main.py")
    for folder in (PROJECT / "outputs/stranger", PROJECT / "examples/../outputs"):
        wanted = read_words(write_run(tmp_path, "agent: " + own % folder))
        with pytest.raises(ConfigError, match="nobody has named that file"):
            require_no_code(
                load_config(list(wanted.words), check=False), wanted.words[0], "main.py"
            )


def test_a_config_that_somebody_named_is_taken_as_it_is(tmp_path: Path) -> None:
    argv = write_run(tmp_path, CODE[0])
    assert not read_words([str(tmp_path / "config.yaml"), *argv]).is_found
    word = "actor_rollout_ref.model.trust_remote_code=true"
    asked = read_words([*argv, word])
    require_no_code(load_config(list(asked.words), check=False), asked.words[0], "main.py")


def test_results_are_written_beside_the_run_and_not_where_its_config_says(tmp_path: Path) -> None:
    wanted = read_words(write_run(tmp_path, "trainer: {default_local_dir: /elsewhere}"))
    loaded = load_config(list(wanted.words), check=False)
    require_no_code(loaded, wanted.words[0], "main.py")
    assert loaded.config.trainer.run_dir == str(tmp_path)


def test_a_record_tells_of_adapters_and_trusts_no_code() -> None:
    own = ModelConfig(path="/own/model")
    taken = _with_recorded(own, {"actor_rollout_ref": {"model": RECORD}}, "run")
    assert not taken.trust_remote_code
    assert (taken.path, taken.lora_rank, taken.lora_alpha) == ("/stranger/model", 4, 8)


def test_code_is_trusted_of_the_base_that_the_command_names_alone(tmp_path: Path) -> None:
    own = ModelConfig(path="/own/model", trust_remote_code=True)
    recorded = {"actor_rollout_ref": {"model": RECORD}}
    with pytest.raises(CannotUse, match="whose code trust_remote_code=true would run"):
        _with_recorded(own, recorded, "run")
    assert _with_recorded(replace(own, path="/stranger/model"), recorded, "run").trust_remote_code
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "stranger/model"}')
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(CannotUse, match="whose code trust_remote_code=true would run"):
        _peft_folder("adapters", tmp_path, own)


def test_words_of_a_recorded_override_are_asked_for_here() -> None:
    section = RECORD | {"override_config": {"attn_implementation": "stranger/kernels"}}
    recorded = {"actor_rollout_ref": {"model": section}}
    with pytest.raises(CannotUse, match=r"override_config\.attn_implementation"):
        _with_recorded(ModelConfig(path="/own/model"), recorded, "run")


@pytest.mark.parametrize("text", CODE)
def test_a_folder_that_is_replayed_brings_no_code_either(text: str, tmp_path: Path) -> None:
    write_run(tmp_path, text)
    with pytest.raises(ConfigError, match="nobody has named that file"):
        replay.read_config(tmp_path)
    named = replay.read_config(tmp_path / "config.yaml")
    assert named.trainer.default_local_dir is None


def test_a_folder_s_places_to_write_to_do_not_matter_to_its_replay(tmp_path: Path) -> None:
    places = "{default_local_dir: /stranger, rollout_data_dir: /stranger/rows}"
    write_run(tmp_path, f"records: {{folder: /stranger/episodes}}\ntrainer: {places}")
    config = replay.read_config(tmp_path)
    assert (config.trainer.default_local_dir, config.trainer.rollout_data_dir) == (None, None)


def test_an_evaluation_stays_in_the_run_s_folder(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    require_in_run([run_dir / "eval/model"], run_dir)
    (run_dir / "eval").symlink_to(tmp_path / "elsewhere/new")
    with pytest.raises(ConfigError, match="--out"):
        require_in_run([run_dir / "eval/model"], run_dir)
