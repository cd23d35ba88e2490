"""Tests the loading of configs: layers, YAML files, and mistakes, which come all together."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.unit.config.helpers import ACTOR, ROLLOUT, checked, load, problems_of
from training.config import EnvironmentChoice
from training.config.loader import ConfigError, LoadedConfig, load_config
from training.config.reference import to_yaml


@pytest.fixture
def inherited(tmp_path: Path) -> Path:
    """Gives a config that extends one with an environment and free settings."""
    (tmp_path / "base.yaml").write_text(
        "agent: {environment: {name: 'textarena:GuessTheNumber-v0', kwargs: {max_number: 10}, "
        "prompt_template: '{x}',\n"
        "  isolation: process}}\ndata: {apply_chat_template_kwargs: {a: {b: 1}}}\n"
    )
    (tmp_path / "run.yaml").write_text("extends: base.yaml\n")
    return tmp_path / "run.yaml"


def test_an_environments_file_takes_the_place_of_an_inherited_name_and_its_settings(
    inherited: Path,
) -> None:
    mine = ["agent.environment.path=mine.py", "agent.environment.cls=Coin"]
    bare = EnvironmentChoice(path="mine.py", cls="Coin", isolation="process")
    assert load(str(inherited), *mine).agent.environment == bare
    loaded = load_config([str(inherited), *mine], check=False)
    assert loaded.sources["agent.environment.kwargs"] == "default"
    # Whatever the order within a layer.
    full = replace(bare, kwargs={"sides": "3"}, prompt_template="{y}")
    more = ["agent.environment.kwargs.sides='3'", "agent.environment.prompt_template='{y}'"]
    assert load(str(inherited), *mine, *more).agent.environment == full
    assert load(str(inherited), *more, *mine).agent.environment == full
    inherited.write_text("extends: base.yaml\nagent: {environment: {path: mine.py, cls: Coin}}\n")
    assert load(str(inherited)).agent.environment == bare
    name = "gymnasium:FrozenLake-v1"
    assert load(
        str(inherited), f"agent.environment.name={name}"
    ).agent.environment == EnvironmentChoice(name=name, isolation="process")


def test_null_leaves_what_is_inherited_of_the_others(inherited: Path) -> None:
    for null in ("null", "None", ""):
        environment = load(str(inherited), f"agent.environment.path={null}").agent.environment
        assert (environment.name, environment.kwargs) == (
            "textarena:GuessTheNumber-v0",
            {"max_number": 10},
        )
    assert load(str(inherited), "agent.environment.name=null").agent.environment.kwargs == {
        "max_number": 10
    }


def test_an_empty_mapping_clears_what_is_inherited(inherited: Path) -> None:
    assert load(str(inherited), "agent.environment.kwargs={}").agent.environment.kwargs == {}
    more = ["agent.environment.kwargs={}", "agent.environment.kwargs.x='1'"]
    assert load(str(inherited), more[1]).agent.environment.kwargs == {"max_number": 10, "x": "1"}
    template = "data.apply_chat_template_kwargs"
    assert load(str(inherited), f"{template}.a={{}}").data.apply_chat_template_kwargs == {"a": {}}
    inherited.write_text("extends: base.yaml\nagent: {environment: {kwargs: {}}}\n")
    assert load(str(inherited)).agent.environment.kwargs == {}


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "data.train_batch_size=many",
            "data.train_batch_size='many' (command line): must be a whole number",
        ),
        (
            "data.train_batch_size=1.5",
            "data.train_batch_size='1.5' (command line): must be a whole number",
        ),
        (
            "data.train_batch_size=null",
            "data.train_batch_size=None (command line): must be a whole number",
        ),
        ("data.seed=inf", "data.seed='inf' (command line): must be a whole number (or null)"),
        ("data.seed=x", "data.seed='x' (command line): must be a whole number (or null)"),
        ("data.shuffle=1", "data.shuffle='1' (command line): must be true or false"),
        ("data.shuffle=si", "data.shuffle='si' (command line): must be true or false"),
        ("data.seed=true", "data.seed='true' (command line): must be a whole number (or null)"),
        (
            f"{ACTOR}.optim.lr=nan",
            f"{ACTOR}.optim.lr='nan' (command line): must be a finite number",
        ),
        (
            f"{ACTOR}.optim.betas=[0.9]",
            f"{ACTOR}.optim.betas[1]=[0.9] (command line): must be given: the setting is "
            "a list of 2 values",
        ),
        (
            "data.truncation=middel",
            "data.truncation='middel' (command line): must be one of 'error', 'left', 'right' or "
            "'middle'. Did you mean 'middle'?",
        ),
        (
            "trainer.logger=[console,wandbb]",
            "trainer.logger[1]='wandbb' (command line): must be one of 'console', 'file', "
            "'json', 'tensorboard', 'wandb', 'mlflow', 'swanlab', 'trackio' or 'clearml'. Did you "
            "mean 'wandb'?",
        ),
        (
            f"{ACTOR}.strategy=megatron",
            f"{ACTOR}.strategy='megatron' (command line): must be one of 'fsdp2' or 'fsdp'. The "
            "Megatron backend is not there",
        ),
        (
            "data.trian_batch_size=4",
            "data.trian_batch_size=4 (command line): there is no such key. Did you mean "
            "'data.train_batch_size'?",
        ),
        (
            "actor.optim.betas=4",
            "actor.optim.betas=4 (command line): there is no such key. Did you mean "
            "'actor_rollout_ref.actor.optim.betas'?",
        ),
        (
            "~data.sead",
            "data.sead='~' (command line): there is no such key. Did you mean 'data.seed'?",
        ),
        (
            "data=4",
            "data=4 (command line): is a section; set its keys, as in data.train_files=VALUE",
        ),
        ("data.seed.x=4", "data.seed={'x': 4} (command line): must be a whole number (or null)"),
        (
            f"{ROLLOUT}.engine_kwargs=4",
            f"{ROLLOUT}.engine_kwargs='4' (command line): must be a mapping, as in {{key: value}}",
        ),
        ("--fast", "'--fast' is no option (see --help)"),
        ("--config-path=configs", "--config-path=configs needs --config-name=NAME too"),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(override: str, problem: str) -> None:
    assert problems_of(override) == [problem]


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("trainer.total_steps", "trainer.total_training_steps"),
        (f"{ROLLOUT}.temprature", f"{ROLLOUT}.temperature"),
        (f"{ROLLOUT}.gpu_memory", f"{ROLLOUT}.gpu_memory_utilization"),
        ("data.gen_size", None),
        (f"{ROLLOUT}.sample_rate", None),
    ],
)
def test_a_key_is_offered_only_where_its_words_are_the_same(key: str, near: str | None) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config([str(PROJECT / "configs/tiny_prompts.yaml"), f"{key}=1"], check=False)
    (problem,) = refused.value.problems
    assert (
        (f"Did you mean '{near}'?" in problem) == (near is not None) == ("Did you mean" in problem)
    )


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "data: {seed: soon}\nalgoritm: {gamma: 1}\ntrainer: {experiment_name: 7}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config([str(tmp_path / "run.yaml"), "critic.ppo_epochs=x"], check=False)
    assert str(caught.value) == (
        "4 problems in the configuration:\n"
        "  - algoritm.gamma=1 (run.yaml): there is no such key. Did you mean 'algorithm.gamma'?\n"
        "  - data.seed='soon' (run.yaml): must be a whole number (or null)\n"
        "  - trainer.experiment_name=7 (run.yaml): must be text; put it in quotes\n"
        "  - critic.ppo_epochs='x' (command line): must be a whole number (or null)"
    )


def test_mistakes_and_failed_checks_are_reported_together(runnable: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(
            [
                *(
                    *runnable,
                    "data.train_batchsize=4",
                    "data.train_files=nope.parquet",
                    f"{ACTOR}.clip_ratio=-1",
                ),
                *("algorithm.adv_estimator=grpoo", f"{ROLLOUT}.m=4"),
            ]
        )
    assert [problem.split("=")[0] for problem in caught.value.problems] == [
        *(
            "data.train_batchsize",
            f"{ROLLOUT}.m",
            f"{ACTOR}.clip_ratio",
            "algorithm.adv_estimator",
            "data.train_files",
        )
    ]


def test_checks_run_at_loading_and_come_together(runnable: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(
            [
                *runnable,
                f"{ACTOR}.optim.lr=0",
                "data.max_response_length=0",
                "trainer.resume_mode=resume_path",
            ]
        )
    assert [problem.split(" ")[0] for problem in caught.value.problems] == [
        f"{ACTOR}.optim.lr='0'",
        "data.max_response_length='0'",
        "trainer.resume_mode=resume_path",
    ]


def test_a_sound_config_has_no_problems_and_loads_with_checks(runnable: list[str]) -> None:
    assert checked(runnable) == []
    assert isinstance(load_config(runnable), LoadedConfig)


def test_yaml_extends_and_command_line_win_in_this_order(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "base.yaml").write_text(
        "data: {seed: 1, train_batch_size: 8, max_prompt_length: 16}\n"
    )
    (tmp_path / "run.yaml").write_text(
        "extends: shared/base.yaml\ndata: {seed: 2, train_batch_size: 4}\ntrainer:\n"
    )
    loaded = load_config([str(tmp_path / "run.yaml"), "data.seed=3"], check=False)
    data = loaded.config.data
    assert (data.seed, data.train_batch_size, data.max_prompt_length, data.shuffle) == (
        3,
        4,
        16,
        True,
    )
    names = ("seed", "train_batch_size", "max_prompt_length", "shuffle")
    assert [loaded.sources[f"data.{name}"] for name in names] == [
        "command line",
        "run.yaml",
        "base.yaml",
        "default",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("extends: run.yaml\n", "`extends` goes in a circle: run.yaml -> run.yaml"),
        ("- 1\n", "run.yaml holds a list; it must hold keys with values"),
        ("data: {seed: 1}\ndata: {seed: 2}\n", "found duplicate key data"),
        ("data: [1\n", "cannot read "),
        (
            "extends: runn.yaml\n",
            "runn.yaml does not exist; YAML files in {0}: run.yaml. Did you mean 'run.yaml'?",
        ),
        (
            "data: {prompt_key: frågan}\n",
            "run.yaml is not text in UTF-8 ('utf-8' codec can't decode byte 0xe5 in position 21",
        ),
    ],
)
def test_a_bad_yaml_is_explained_and_what_it_left_out_is_not_called_missing(
    text: str, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError) as caught:
        load_config([str(tmp_path / "run.yaml")])
    (found,) = caught.value.problems
    assert problem.replace("{0}", str(tmp_path)) in found


def test_what_a_yaml_extends_is_beside_it_or_where_other_paths_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    run = tmp_path / "mine/run.yaml"
    run.write_text("extends: configs/quickstart.yaml\n")
    assert load(str(run)).trainer.project_name == "quickstart"
    (tmp_path / "mine/configs").mkdir()
    (tmp_path / "mine/configs/quickstart.yaml").write_text("data: {seed: 77}\n")
    assert load(str(run)).data.seed == 77
    run.write_text("extends: agent.yaml\n")
    with pytest.raises(ConfigError) as caught:
        load_config([str(run)])
    (problem,) = caught.value.problems
    assert problem == (
        f"{tmp_path}/mine/agent.yaml does not exist; YAML files in {tmp_path}/mine: run.yaml. Did "
        "you mean 'configs/agent.yaml' of the project?"
    )


def test_inputs_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(
        "configs/ppo_trainer.yaml", "data.train_files=[configs/ppo_trainer.yaml,absent.parquet]"
    )
    assert config.data.train_files == (str(PROJECT / "configs/ppo_trainer.yaml"), "absent.parquet")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/ppo_trainer.yaml").write_text("data: {seed: 77}\n")
    config = load("configs/ppo_trainer.yaml", "data.train_files=configs/ppo_trainer.yaml")
    assert (config.data.seed, config.data.train_files) == (77, ("configs/ppo_trainer.yaml",))


def test_a_saved_config_loads_to_an_equal_one(tmp_path: Path) -> None:
    config = load(
        *(
            "data.train_files=[a.parquet,b.parquet]",
            "trainer.experiment_name=007",
            f"{ACTOR}.optim.lr=3e-7",
        ),
        *(
            "data.seed=4",
            f"{ROLLOUT}.engine_kwargs={{vllm: {{seed: 3, mode: 'null'}}}}",
            "trainer.logger=[]",
        ),
        *(
            "custom_reward_function.reward_kwargs.text='yes: \"no\" # 1'",
            f"{ACTOR}.optim.betas=[0.8,0.99]",
        ),
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load(str(tmp_path / "config.yaml")) == config
    assert config.custom_reward_function.reward_kwargs == {"text": 'yes: "no" # 1'}


@pytest.mark.seconds
def test_reading_a_config_does_not_import_torch() -> None:
    code = "import sys, training.config.loader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT).returncode == 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            "--config-path {0}/mine --config-name quikstart",
            "{0}/mine/quikstart.yaml does not exist; YAML files in {0}/mine: other.yml, "
            "quickstart.yaml. Did you mean 'quickstart.yaml'?",
        ),
        ("--config-path {0}/mine --config-name=others.yml", "Did you mean 'other.yml'?"),
        (
            "--config-path={0}/mime --config-name quickstart",
            "folders in {0}: many, mine. Did you mean 'mine'?",
        ),
        (
            "{0}/mime/deeper/quickstart.yaml",
            "quickstart.yaml does not exist; folders in {0}: many, mine. Did you mean 'mine'?",
        ),
        (
            "--config-path={0}/many --config-name=x",
            "many: c00.yaml, c01.yaml, c02.yaml, c03.yaml, c04.yaml, c05.yaml, ",
        ),
        ("--config-path={0}/many --config-name=x", "c11.yaml, …."),
    ],
)
def test_a_yaml_that_is_not_there_is_named_with_what_is(
    words: str, problem: str, tmp_path: Path
) -> None:
    many = [f"many/c{number:02}.yaml" for number in range(13)]
    for name in ("mine/quickstart.yaml", "mine/other.yml", "mine/notes.txt", *many):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (found,) = problems_of(*words.format(tmp_path).split())
    assert problem.replace("{0}", str(tmp_path)) in found


def test_what_only_follows_from_a_mistake_is_left_out(runnable: list[str]) -> None:
    """1024, the misspelt key's default, is no multiple of 3; `rollout.n` is short for its key."""
    wrong = [f"{ACTOR}.ppo_mini_batch_size=3", "trainer.n_gpus_per_node=2"]
    # For the actor and the critic: neither fits the batch nor the ranks.
    assert len(checked(runnable, *wrong)) == 4
    mistakes = ["data.train_batch_sise=6", f"{ROLLOUT}.n=x", "critic.optim.lr=-1"]
    with pytest.raises(ConfigError) as caught:
        load_config([*runnable, *wrong, *mistakes])
    keys = [problem.split("=")[0] for problem in caught.value.problems]
    assert keys == ["data.train_batch_sise", f"{ROLLOUT}.n", "critic.optim.lr"]
