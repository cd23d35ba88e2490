"""Tests the command line: its values and the files that it names."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.unit.config.helpers import ACTOR, ROLLOUT, load, problems_of
from training.config import PPOConfig
from training.config.leaves import Leaf, leaves
from training.config.loader import ConfigError, load_config
from training.config.values import as_text
from training.features import moved_keys


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


# As features move their settings; those of the features that are there are tried with them.
MOVED = {
    "trainer.older_seed": "data.seed",
    "trainer.older_steps": "agent.max_turn",
    "agent.older_template": "data.apply_chat_template_kwargs",
}


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the core that have other names besides."""
    monkeypatch.setattr("training.config.layers.moved_keys", lambda: MOVED)


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["trainer.older_seed=3", "~trainer"], {}),
        (["trainer.older_seed=3", "~trainer.older_seed"], {}),
        (["trainer.older_seed=3", "~data"], {}),
        (
            ["trainer.older_seed=3", "trainer.older_steps=4", "trainer.nnodes=2", "~trainer"],
            {},
        ),
        (["agent.older_template={a: {b: c}}", "agent.max_turn=3", "~agent"], {}),
        (["agent.older_template={a: b}", "~agent.older_template"], {}),
        # Its own name is not of that section.
        (["data.seed=3", "~trainer"], {"data.seed": 3}),
        (["trainer.older_seed=3", "data.seed=3", "~trainer"], {"data.seed": 3}),
        (["data.seed=3", "trainer.older_seed=3", "~trainer"], {}),
        (["~trainer", "trainer.older_seed=3"], {"data.seed": 3}),
        (["trainer.older_seed=3", "~agent"], {"data.seed": 3}),
        (["trainer.older_seed=3", "agent.max_turn=4", "~trainer"], {"agent.max_turn": 4}),
        # What is wrong goes with them.
        (["trainer.older_seed=nonsense", "~trainer"], {}),
        ([f"{ACTOR}.no_such_key=3", f"~{ACTOR}"], {}),
    ],
)
def test_a_section_s_older_keys_go_back_to_their_defaults_with_it(
    words: list[str], kept: dict[str, Any], moved: None
) -> None:
    loaded = load_config(words, check=False)
    values = dict(leaves(loaded.config))
    given = {key for key, source in loaded.sources.items() if source != "default"}
    assert {key: values[key].value for key in given} == kept


def test_older_keys_of_a_file_go_back_with_their_section(tmp_path: Path, moved: None) -> None:
    (tmp_path / "base.yaml").write_text("trainer: {older_seed: 1, older_steps: 2, nnodes: 2}\n")
    (tmp_path / "run.yaml").write_text("extends: base.yaml\nagent: {max_turn: 3}\n")
    loaded = load_config([str(tmp_path / "run.yaml"), "~trainer"], check=False)
    given = {key: source for key, source in loaded.sources.items() if source != "default"}
    assert given == {"agent.max_turn": "run.yaml"}


@pytest.mark.parametrize(("old", "now"), sorted(moved_keys().items()))
def test_each_older_key_goes_back_with_its_section_and_by_both_names(old: str, now: str) -> None:
    value = value_for(dict(leaves(PPOConfig())), now)
    section = old.partition(".")[0]
    for back in (f"~{section}", f"~{old}", f"~{now}"):
        loaded = load_config([f"{old}={value}", back], check=False)
        assert set(loaded.sources.values()) == {"default"}, back
    loaded = load_config([f"~{section}", f"{old}={value}"], check=False)
    given = [key for key, source in loaded.sources.items() if source != "default"]
    assert given and all(f"{key}.".startswith(f"{now}.") for key in given)


def value_for(schema: dict[str, Leaf], key: str) -> str:
    """Returns as text what a setting, or the first one inside a section, takes as it stands."""
    if key in schema:
        return as_text(schema[key].value) or "null"
    inside = next(name for name in schema if name.startswith(f"{key}."))
    name = inside.removeprefix(f"{key}.")
    return f"{{{name}: {value_for(schema, inside)}}}"


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


@pytest.mark.parametrize("override", ["trainer.logger=[console", "trainer.logger='[console'"])
def test_an_unclosed_bracket_is_reported_not_raised(override: str) -> None:
    (problem,) = problems_of(override)
    assert problem.startswith("trainer.logger='[console' (command line): ")
    assert problem.endswith("check brackets and quotes")


@pytest.mark.parametrize(
    "form", ["--config-path={0} --config-name=run", "--config-path {0} --config-name run.yaml"]
)
def test_hydras_two_options_name_a_yaml(form: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: {seed: 5}\n")
    assert load(*form.format(tmp_path).split(), "data.max_prompt_length=9").data.seed == 5


def test_only_one_yaml_is_taken(tmp_path: Path) -> None:
    assert problems_of("no_a.yaml", "no_b.yaml") == [
        "give one CONFIG.yaml, not no_a.yaml no_b.yaml; a YAML can say `extends: other.yaml`"
    ]


@pytest.mark.parametrize(
    ("words", "strays"),
    [
        (["trainer.nnodes", "2"], "'trainer.nnodes', '2'"),
        (["trainer.nnodes", "=", "2"], "'trainer.nnodes', '=', '2'"),
        (["trainer.nnodes=", "2"], "'2'"),
        (["trainer.nnodes:2"], "'trainer.nnodes:2'"),
    ],
)
def test_a_setting_that_is_not_one_word_is_told_how_it_is_written(
    words: list[str], strays: str
) -> None:
    (problem,) = problems_of("configs/quickstart.yaml", *words)
    assert problem == (
        f"{strays}: neither a file that ends in .yaml nor KEY=VALUE; a setting is one word without "
        "blanks, as data.train_batch_size=8"
    )


def test_blanks_around_the_sign_in_one_word_do_no_harm() -> None:
    assert load("data.train_batch_size = 4").data.train_batch_size == 4


def test_a_setting_with_dashes_does_not_hide_the_words_behind_it() -> None:
    assert problems_of("--data.seed=4", "data.seed=x", "-n") == [
        "'--data.seed=4' is no option; a setting has no dashes: data.seed=VALUE",
        "'-n' is no option (see --help)",
        "data.seed='x' (command line): must be a whole number (or null)",
    ]


def test_help_prints_the_keys_and_stops(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(["--help"])
    assert caught.value.code == 0
    assert "ppo_mini_batch_size: null  # prompts per optimiser step" in capsys.readouterr().out


def test_problems_stay_one_a_line_on_their_way_from_another_process() -> None:
    error = pickle.loads(pickle.dumps(ConfigError(["one", "two"])))
    assert error.problems == ["one", "two"]
    assert str(error) == "2 problems in the configuration:\n  - one\n  - two"
