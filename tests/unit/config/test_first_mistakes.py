"""Tests what a first day gets wrong: each mistake is told with what was given and what to write."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.config.helpers import ACTOR, ROLLOUT, ROW, checked, load, problems_of
from training.building import build_trainer
from training.config.loader import ConfigError, load_config

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
ENVIRONMENT = "agent.environment"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("data:\n\tseed: 1\n", "line 2, column 1: .*; YAML is indented by blanks"),
        ("data: {seed: 1}\ndata: {seed: 2}\n", "line 2, column 1: found duplicate key data; a key"),
        ("data:\n  seed: 1\n   shuffle: true\n", "line 3, .*begin in the same column"),
        ("data:\n  seed: 1\n shuffle: true\n", "line 3, .*begin in the same column"),
        ("data:\n  seed:1\n  shuffle: true\n", "line 3, .*a blank follows each ':'"),
        ("data: {seed: 1\ntrainer: {nnodes: 1}\n", "line 2, .*check brackets"),
        ("data: {seed: 1, prompt_key: @x}\n", "line 1, .*begins with this character needs quotes"),
        ('data: {prompt_key: "x\n', "a bracket or a quote is not closed"),
    ],
)
def test_a_fault_of_a_yaml_file_is_told_with_its_line_and_a_fix(
    text: str, problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    (told,) = problems_of(str(file))
    assert "\n" not in told
    assert re.search(problem, told)


@pytest.mark.parametrize("change", [("\n", "\r\n"), ("data", "\ufeffdata")])
def test_windows_line_ends_and_a_byte_order_mark_are_read(
    change: tuple[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data:\n  seed: 7\n".replace(*change), encoding="utf-8", newline="")
    assert load(str(file)).data.seed == 7


def test_a_missing_blank_behind_a_colon_is_told(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {experiment_name:mine, nnodes: 1}\n")
    (problem,) = problems_of(str(file))
    assert problem.endswith("a blank is missing: write trainer.experiment_name: mine")


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ("lr", f"{ACTOR}.optim.lr"),
        ("actor.learning_rate", f"{ACTOR}.optim.lr"),
        ("critic.learning_rate", "critic.optim.lr"),
        ("data.batch_size", "data.train_batch_size"),
        ("trainer.output_dir", "trainer.default_local_dir"),
        ("trainer.gpus", "trainer.n_gpus_per_node"),
        ("env", "agent.environment.path"),
        ("beta", f"{ACTOR}.kl_loss_coef"),
        ("report_to", "trainer.logger"),
        ("dataset", "data.train_files"),
    ],
)
def test_another_trainers_name_of_a_setting_leads_to_ours(given: str, key: str) -> None:
    (problem,) = problems_of(f"{given}=1")
    assert problem.endswith(f"there is no such key. Did you mean '{key}'?")


def test_words_for_truth_are_read_alike_on_the_command_line_and_in_yaml(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: {shuffle: no}\n")
    assert load(str(tmp_path / "run.yaml")).data.shuffle is False
    assert load("data.shuffle=no").data.shuffle is False
    assert load(f"{ACTOR}.use_kl_loss=On").actor_rollout_ref.actor.use_kl_loss is True


def test_short_names_and_lists_without_brackets_are_told_how_they_are_written() -> None:
    (problem,) = problems_of(f"{ROLLOUT}.dtype=fp16")
    assert problem.endswith("Did you mean 'float16'?")
    (problem,) = problems_of("trainer.logger=console,file")
    assert problem.endswith("A list is written in brackets: [console,file]")
    (problem,) = problems_of("agent.environment=game.py")
    assert problem.endswith("is a section; set its keys, as in agent.environment.path=VALUE")


def test_a_misspelt_file_of_the_project_is_named_where_it_is_extended(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("extends: configs/quickstrat.yaml\n")
    (problem,) = problems_of(str(tmp_path / "run.yaml"))
    assert problem.endswith("Did you mean 'configs/quickstart.yaml' of the project?")


def test_home_and_variables_are_read_in_paths_to_read_and_to_write(
    runnable: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PLACE", str(tmp_path))
    paths = [
        "data.train_files=$PLACE/train.jsonl",
        "data.val_files=~/val.jsonl",
        "trainer.default_local_dir=~/run",
        "trainer.rollout_data_dir=$PLACE/episodes",
    ]
    assert checked(runnable, *paths) == []
    config = load(*runnable, *paths)
    assert config.data.train_files == (str(tmp_path / "train.jsonl"),)
    assert config.data.val_files == (str(tmp_path / "val.jsonl"),)
    assert config.trainer.run_dir == str(tmp_path / "run")
    assert config.trainer.rollout_data_dir == str(tmp_path / "episodes")


def test_what_is_no_file_is_told_by_the_form_of_its_path(
    runnable: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / "rows" / name).write_text(json.dumps(ROW))
    fixes = {
        "rows": "; it is a folder, name a file in it: rows/a.jsonl, rows/b.jsonl",
        "rows/*.jsonl": "; patterns are not read, give a list: [rows/a.jsonl, rows/b.jsonl]",
        "train.jsonl,val.jsonl": "; give several as a list: [train.jsonl,val.jsonl]",
        "openai/gsm8k": "; data sets of a hub are made into files of rows first, as "
        "examples/prepare_gsm8k.py does",
        "rows/c.jsonl": f"(seen from {tmp_path})",
    }
    for path, fix in fixes.items():
        (problem,) = checked(runnable, f"data.train_files={path}")
        assert problem.startswith(f"data.train_files={path} is not a file")
        assert problem.endswith(fix)
    (problem,) = checked(runnable, "custom_reward_function.path=score.py:mine")
    assert problem.endswith("; give score.py here, and mine under the key beside it, cls or name")


def test_fewer_rows_than_a_step_has_are_told_with_the_other_problems(
    runnable: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "few.jsonl"
    file.write_text((json.dumps(ROW) + "\n") * 3)
    few = [f"data.train_files={file}", "data.train_batch_size=4"]
    assert checked(runnable, *few, "data.val_files=nowhere.jsonl") == [
        "data.train_batch_size=4 is more than the rows of data.train_files, 3: make it smaller or "
        "give more rows",
        f"data.val_files=nowhere.jsonl is not a file (seen from {Path.cwd()})",
    ]
    assert checked(runnable, few[0], "data.train_batch_size=3") == []


def test_chat_messages_that_were_stored_as_text_are_not_trained_on(
    runnable: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "text.jsonl"
    messages = [{"role": "user", "content": "2 + 3?"}]
    small = [f"data.train_files={file}", "data.train_batch_size=1"]
    file.write_text(json.dumps(ROW | {"prompt": json.dumps(messages)}))
    (problem,) = checked(runnable, *small)
    assert "has chat messages as text under 'prompt'; store them as a list" in problem
    file.write_text(json.dumps(ROW | {"prompt": messages[0]}))
    (problem,) = checked(runnable, *small)
    assert "has one message under 'prompt'; chat messages are a list of them" in problem
    for prompt in (messages, "[{ begins no list", '[{"x": 1}]'):
        file.write_text(json.dumps(ROW | {"prompt": prompt}))
        assert checked(runnable, *small) == []


@pytest.mark.seconds
def test_weights_that_were_not_fetched_or_cut_are_told_before_they_are_loaded(
    runnable: list[str],
) -> None:
    folder = Path(runnable[0].partition("=")[2])
    weights = folder / "model.safetensors"
    save_file({"w": torch.zeros(40)}, weights)
    assert checked(runnable) == []
    whole = weights.read_bytes()
    for cut in (0, 5, 20, len(whole) - 1):
        weights.write_bytes(whole[:cut])
        (problem,) = checked(runnable)
        assert f"model.safetensors ({cut} bytes) is cut or damaged: its header" in problem
    weights.write_text(LFS_POINTER)
    (problem,) = checked(runnable)
    assert problem.endswith("model.safetensors is a pointer of Git LFS: `git lfs pull`")


def test_a_tokenizer_that_cannot_be_loaded_names_the_model(runnable: list[str]) -> None:
    folder = Path(runnable[0].partition("=")[2])
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        build_trainer(load(*runnable))
    (problem,) = caught.value.problems
    assert problem.startswith(f"{runnable[0]}: its tokenizer cannot be loaded (")
    assert problem.endswith("save the model's tokenizer into that folder")


def test_a_file_in_the_place_of_a_models_folder_is_told(runnable: list[str]) -> None:
    folder = runnable[0].partition("=")[2]
    (problem,) = checked(runnable, f"actor_rollout_ref.model.path={folder}/config.json")
    assert problem.endswith(f"; it is a file, give the folder that it is in, {folder}")


def test_a_folder_that_is_not_there_is_not_suggested(
    runnable: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (problem,) = checked(runnable, "actor_rollout_ref.model.path=models/tiny")
    assert problem.endswith("; there is no 'models', but 'model'")


def test_ppo_and_other_letters_lead_to_an_estimator(runnable: list[str]) -> None:
    (problem,) = checked(runnable, "algorithm.adv_estimator=PPO")
    assert problem.endswith("PPO with a critic is 'gae'")
    (problem,) = checked(runnable, "algorithm.adv_estimator=GRPO")
    assert problem.endswith("Did you mean 'grpo'?")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("class Game:\n    def reset(self): ...\n", f"{ENVIRONMENT}: Game has no step: write it"),
        ("class Game: pass\n", f"{ENVIRONMENT}: Game has no reset and no step: write it"),
        (
            "from custom.env import BaseEnvironment\nclass Game(BaseEnvironment):\n"
            "    def reset(self): ...\n    def stpe(self, action): ...\n",
            f"{ENVIRONMENT}: Game has no step: write it",
        ),
        (
            "class Game:\n    def reset(self): ...\n    def step(self): ...\n",
            "takes (self); it is called as step(action): too many positional arguments",
        ),
        (
            "class Game:\n    def reset(self): ...\n    def step(self, action, tool): ...\n",
            "takes (self, action, tool); it is called as step(action): missing a required argument",
        ),
        (
            "from .rules import X\nclass Game: ...\n",
            "write `from NAME import …` without the dot: files beside this one are found",
        ),
    ],
)
def test_an_environments_methods_are_looked_at_before_it_is_made(
    source: str, problem: str, runnable: list[str], tmp_path: Path
) -> None:
    (tmp_path / "game.py").write_text(source)
    game = [f"{ENVIRONMENT}.path={tmp_path}/game.py", f"{ENVIRONMENT}.cls=Game"]
    (told,) = checked(runnable, *game)
    assert problem in told


def test_an_environment_that_hands_its_methods_on_is_taken(
    runnable: list[str], tmp_path: Path
) -> None:
    (tmp_path / "game.py").write_text(
        "class Game:\n    def __getattr__(self, name): return print\n\n"
        "def make(size=3): return Game()\n"
    )
    for name in ("Game", "make"):
        game = [f"{ENVIRONMENT}.path={tmp_path}/game.py", f"{ENVIRONMENT}.cls={name}"]
        assert checked(runnable, *game) == []


def test_the_names_of_environments_lead_to_the_right_key(runnable: list[str]) -> None:
    (problem,) = checked(runnable, f"{ENVIRONMENT}.name=Game")
    assert problem.endswith(f"{ENVIRONMENT}.path=FILE.py and {ENVIRONMENT}.cls=CLASS")
    (problem,) = checked(runnable, f"{ENVIRONMENT}={{path: game.py, name: Game}}")
    assert problem.endswith(f"give one of them; the class in a file is {ENVIRONMENT}.cls")


LIFT = """
from custom.env import BaseEnvironment
from custom.tools import Tool, ToolDefinition

LIMIT = 3


class LiftTool(Tool):
    definition = ToolDefinition(
        name="lift", parameters={"type": "object", "properties": {"floor": {"type": "str"}}}
    )

    def execute(self, floor):
        return ""


class LiftNum(BaseEnvironment):
    def __init__(self) -> None:
        pass

    def reset(self, seed=None):
        return ""

    def step(self, action):
        return "", 0.0, True, {}


def paid(trajectory):
    return 1.0
"""


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("agent.parser=jsn", "(command line): is no parser; allowed: auto, deepseek, "),
        ("agent.parser=jsn", "react, vllm:NAME. Did you mean 'json'?"),
        ("--explian", "'--explian' is no option (see --help). Did you mean '--explain'?"),
        ("agent.environment.cls=LiftNmu", "it has: LiftNum. Did you mean 'LiftNum'?"),
        ("agent.environment.kwargs={a: 1}", "LiftNum takes (), not ['a']"),
        ("custom_reward_function.path=lift.py", "it has: paid; with an environment define `def "),
        (
            "agent.tools=[lift.py:LiftTool]",
            "tool 'lift': properties.floor.type='str' is no type of a schema; allowed: array, "
            "boolean, integer, null, number, object, string. Did you mean 'string'?",
        ),
    ],
)
def test_a_slip_about_a_file_of_ones_own_is_told_with_the_fix(
    override: str,
    told: str,
    runnable: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lift.py").write_text(LIFT)
    game = ["agent.environment.path=lift.py", "agent.environment.cls=LiftNum"]
    (problem,) = checked(runnable, *game, override)
    assert told in problem and "Value error" not in problem


def test_a_bad_value_brings_no_warning_about_its_default(
    runnable: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = [*runnable, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=0"]
    with pytest.raises(ConfigError) as caught:
        load_config(words, ask_engine=False)
    assert caught.value.problems == [
        "actor_rollout_ref.rollout.n='0' (command line): must be above 0"
    ]
    assert "each keeps its raw score" not in caplog.text


def test_a_mapping_for_a_text_is_told_as_what_it_is() -> None:
    (told,) = problems_of("custom_algorithm.path=mine.py")
    assert told == (
        "custom_algorithm={'path': 'mine.py'} (command line): must be text, and no mapping with "
        "keys of its own (or null)"
    )
