"""What an evaluation leaves out of a training's settings, and what it says of its samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from features.evaluation.command import distinct_names
from features.evaluation.config import DO_SAMPLE, evaluation_config, require_tasks, with_samples
from features.evaluation.evaluated_model import EvaluatedModel, find_model
from features.evaluation.evaluated_weights import EvaluatedWeights
from features.evaluation.evaluation import name_in, require_no_run, write_json
from features.evaluation.summary import (
    Pairing,
    compare,
    describe,
    require_same_tasks,
    say_difference,
    summarise,
)
from features.evaluation.words import read_words
from tests.conftest import PROJECT
from training.config import ModelConfig, PPOConfig
from training.config.cross_checks import cross_problems
from training.config.leaves import sections
from training.config.loader import ConfigError, load_config
from training.modes import chosen_mode
from training.run.abort_policy import EnvironmentsFail
from training.run.named_model import CannotUse
from training.validation import ValidationSamples

CONFIGS = sorted(path.name for path in (PROJECT / "configs").glob("*.yaml"))
HARD_TO_EVALUATE = (
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "algorithm.rollout_correction.rollout_is=sequence",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.rollout_n_gpus=2",
    "trainer.n_gpus_per_node=2",
    "trainer.async_level=1",
    "trainer.critic_warmup=1",
    "trainer.test_freq=5",
    "trainer.resume_mode=resume_path",
    "trainer.resume_from_path=somewhere",
)


def settings_of(name: str, *overrides: str) -> PPOConfig:
    return load_config([str(PROJECT / "configs" / name), *overrides], check=False).config


def a_model(name: str = "global_step_2", **changes: object) -> EvaluatedModel:
    weights = EvaluatedWeights("checkpoint", "/run/global_step_2/actor/model")
    model = EvaluatedModel(name, name, ModelConfig(path="/run/model"), weights, 2, Path("/run"))
    return replace(model, **changes)


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_that_train_alone_never_stand_in_an_evaluations_way(name: str) -> None:
    for overrides in ((), HARD_TO_EVALUATE):
        config = evaluation_config(settings_of(name, *overrides), a_model(), Path("/out"))
        problems = [text for part in sections(config) for text in part.problems()]
        problems += cross_problems(config)
        assert problems == []
        assert not config.need_values
        assert not config.need_reference
        assert config.trainer.all_ranks == config.trainer.num_ranks
        assert config.trainer.run_dir == "/out"


def test_an_engine_reads_no_weights_from_a_folder_that_has_none() -> None:
    vllm = settings_of("gsm8k_grpo.yaml", "actor_rollout_ref.rollout.name=vllm")
    kwargs = evaluation_config(vllm, a_model(), Path("/out")).actor_rollout_ref.rollout
    assert kwargs.engine_kwargs["vllm"]["load_format"] == "dummy"
    whole = a_model(weights=EvaluatedWeights("folder", "/model"))
    kwargs = evaluation_config(vllm, whole, Path("/out")).actor_rollout_ref.rollout
    assert "load_format" not in kwargs.engine_kwargs.get("vllm", {})


def test_several_samples_are_drawn_as_in_training_unless_validation_samples_itself() -> None:
    config = settings_of("tiny_prompts.yaml", "actor_rollout_ref.rollout.temperature=0.7")
    sampled = with_samples(config, 16).actor_rollout_ref.rollout.val_kwargs
    assert (sampled.n, sampled.do_sample, sampled.temperature) == (16, True, 0.7)
    kwargs = "actor_rollout_ref.rollout.val_kwargs"
    own = settings_of("tiny_prompts.yaml", f"{kwargs}.do_sample=true", f"{kwargs}.temperature=0.2")
    assert with_samples(own, 16).actor_rollout_ref.rollout.val_kwargs.temperature == 0.2
    assert not with_samples(config, 1).actor_rollout_ref.rollout.val_kwargs.do_sample
    assert with_samples(config, None) is config


def test_several_greedy_answers_are_refused_of_prompts_and_played_in_environments() -> None:
    asked = {DO_SAMPLE: "command line"}
    with pytest.raises(ConfigError, match="one greedy answer 4 times"):
        with_samples(settings_of("tiny_prompts.yaml"), 4, asked)
    played = with_samples(settings_of("quickstart.yaml"), 4, asked)
    assert not played.actor_rollout_ref.rollout.val_kwargs.do_sample
    with pytest.raises(ConfigError, match="1 or more"):
        with_samples(settings_of("quickstart.yaml"), 0)


def test_without_tasks_it_is_said_what_to_set() -> None:
    require_tasks(settings_of("quickstart.yaml"))
    with pytest.raises(ConfigError, match=r"agent\.val_length=100"):
        require_tasks(settings_of("quickstart.yaml", "agent.val_length=0"))
    with pytest.raises(ConfigError, match=r"data\.val_files="):
        require_tasks(settings_of("tiny_prompts.yaml", "data.val_files=[]"))


def samples_of(
    rewards: list[list[float]], preds: list[list[str]] | None = None
) -> ValidationSamples:
    n = len(rewards[0])
    size = len(rewards) * n
    infos: dict[str, list[object]] = {"reward": [value for task in rewards for value in task]}
    if preds is not None:
        infos["pred"] = [value for task in preds for value in task]
    return ValidationSamples(
        sources=["game"] * size,
        uids=[f"val.0.{task}" for task in range(len(rewards)) for _ in range(n)],
        endings=["done"] * size,
        tokens=[2] * size,
        infos=infos,
    )


def test_a_summary_is_worked_by_hand() -> None:
    rewards = [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    preds = [["a", "b", "a"], ["c", "c", "c"]]
    summary = summarise(samples_of(rewards, preds), [], 1.0)
    game = summary["sources"]["game"]
    assert game["mean"]["value"] == pytest.approx(1 / 3)
    assert game["std_over_tasks"] == pytest.approx(np.std([2 / 3, 0], ddof=1))
    assert game["std_over_samples"] == pytest.approx(np.sqrt(2 / 9) / 2)
    passed = [game[f"pass@{k}"]["value"] for k in (1, 2, 3)]
    assert passed == pytest.approx([1 / 3, 1 / 2, 1 / 2])
    votes = [game[f"maj@{k}"]["value"] for k in (1, 2, 3)]
    # In two of three subsets of two samples a and b are tied.
    assert votes == pytest.approx([1 / 3, (1 + 0.5 + 0.5) / 3 / 2, 1 / 2])
    assert summary["tasks"] == 2
    assert [task["rewards"] for task in summary["by_task"]] == rewards


def test_sources_are_shown_each_and_together_and_an_answers_acc_is_what_passes() -> None:
    samples = samples_of([[0.2], [0.9], [0.4]])
    samples.sources = ["maths", "maths", "code"]
    samples.infos["acc"] = [False, True, 1]
    summary = summarise(samples, [], 1.0)
    assert list(summary["sources"]) == ["maths", "code", "all"]
    assert summary["sources"]["all"]["mean"]["value"] == pytest.approx(0.5)
    assert summary["sources"]["all"]["pass@1"]["value"] == pytest.approx(2 / 3)
    assert summary["pass"] == "acc 1"
    samples.infos["acc"] = [float("nan"), True, 1]
    assert summarise(samples, [], 1.0)["pass"] == "a reward of 1 or more"
    assert len(summary["by_task"]) == 3


def test_episodes_that_a_judge_failed_to_score_and_rewards_of_no_range_are_told() -> None:
    samples = samples_of([[0.0, 3.0], [7.0, 1.0]])
    samples.infos["unscored"] = [True, False, None, False]
    result = summarise(samples, [], 1.0)
    result |= {"sampling": {"do_sample": False}, "seeded_as_step": 0}
    text = describe(result, "model")
    assert result["unscored_episodes"] == 1
    assert "1 of 4 episodes have no score, as the judge or reward function failed" in text
    [mean] = [line for line in text.split("\n") if "mean@" in line]
    [passed] = [line for line in text.split("\n") if "pass@1" in line]
    assert mean.endswith("(approximate)") and "approximate" not in passed


def played(rewards: Mapping[str, Sequence[float]]) -> ValidationSamples:
    """Makes samples of sources, one a task."""
    values = [value for of_source in rewards.values() for value in of_source]
    samples = samples_of([[value] for value in values])
    samples.sources = [name for name, of_source in rewards.items() for _ in of_source]
    return samples


@pytest.mark.parametrize(
    ("rewards", "low", "high"),
    [
        ([1.0] * 10, 0.6915, 1.0),
        ([-1.0] * 10, -1.0, -0.383),
        ([0.0] * 10, 0.0, 0.3085),
        ([1.0] * 11 + [-1.0], 0.2304, 0.9958),
        ([-0.5] * 10, -0.9119, 0.2116),
        ([3.0] * 10, None, None),
    ],
)
def test_an_evaluation_and_a_validation_have_one_interval_of_the_same_rewards(
    rewards: list[float], low: float | None, high: float | None
) -> None:
    samples = played({"game": rewards})
    mean = summarise(samples, [], 1.0)["sources"]["game"]["mean"]
    metrics = samples.metrics(42)
    name = "val-core/game/reward/mean@1"
    assert (mean["low"], mean["high"]) == (
        metrics.get(f"{name}/ci_low"),
        metrics.get(f"{name}/ci_high"),
    )
    if low is None:
        assert mean["low"] is None
    else:
        assert (mean["low"], mean["high"]) == pytest.approx((low, high), abs=1e-4)


def test_samples_show_the_range_where_the_means_of_tasks_hide_it() -> None:
    samples = samples_of([[1.0, -1.0]] * 10)
    game = summarise(samples, [], 1.0)["sources"]["game"]["mean"]
    assert game["low"] == samples.metrics(42)["val-core/game/reward/mean@2/ci_low"]
    assert game["low"] == pytest.approx(2 * 0.1871 - 1, abs=1e-4)
    beyond = samples_of([[2.0, 0.0]] * 10, [["a", "a"]] * 10)
    summary = summarise(beyond, [], 1.0)["sources"]["game"]
    assert summary["mean"]["low"] is None and summary["maj@2"]["low"] is None
    assert "val-core/game/reward/mean@2/ci_low" not in beyond.metrics(42)


def test_a_source_has_its_own_numbers_whatever_its_name_is() -> None:
    rewards = {"all": [0.0] * 4, "b": [1.0] * 4}
    result = summarise(played(rewards), [], 1.0)
    means = {name: entry["mean"]["value"] for name, entry in result["sources"].items()}
    assert means == {"all": 0.0, "b": 1.0, "all_sources": 0.5}
    assert len(result["by_task"]) == 8
    better = summarise(played({"all": [1.0] * 4, "b": [1.0] * 4}), [], 1.0)
    differences = compare(better, result)
    assert {name: entry["value"] for name, entry in differences.items()} == {
        "all": 1.0,
        "b": 0.0,
        "all_sources": 0.5,
    }
    three = summarise(played({"all": [0.0], "all_sources": [1.0], "c": [0.5]}), [], 1.0)
    assert list(three["sources"]) == ["all", "all_sources", "c", "all_sources_"]
    alone = summarise(played({"all": [0.0, 1.0]}), [], 1.0)
    assert list(alone["sources"]) == ["all"] and len(alone["by_task"]) == 2


def test_tasks_of_two_sources_that_share_a_uid_are_two_tasks() -> None:
    samples = played({"a": [1.0, 0.0], "b": [0.0, 0.0]})
    samples.uids = ["0", "1", "0", "1"]
    result = summarise(samples, [], 1.0)
    assert result["tasks"] == 4 and result["samples_per_task"] == 1
    assert (result["sources"]["all"]["tasks"], result["sources"]["all"]["samples"]) == (4, 1)


def test_tasks_of_which_some_would_be_left_out_of_the_table_are_refused() -> None:
    samples = ValidationSamples(
        sources=["maths"] * 3,
        uids=["a", "b", "b"],
        endings=["done"] * 3,
        tokens=[1] * 3,
        infos={"reward": [0.0, 1.0, 1.0]},
    )
    with pytest.raises(ValueError, match="tasks have 1 or 2 samples"):
        summarise(samples, [], pass_reward=1.0)


def test_one_task_is_described_without_an_interval() -> None:
    result = summarise(samples_of([[0.5]]), [], 1.0)
    result |= {"sampling": {"do_sample": False}, "seeded_as_step": 0}
    text = describe(result, "model")
    assert "1 task x 1 sample, greedy" in text
    assert "mean@1   0.500\n" in text
    assert "one task shows no interval" in text


def said(first: list[list[float]], second: list[list[float]]) -> str:
    results = [summarise(samples_of(rewards), [], 1.0) for rewards in (first, second)]
    return say_difference(compare(*results)["game"], "A", "B")


def test_a_difference_is_said_in_a_sentence_with_its_interval() -> None:
    good, bad = [[0.8], [0.9]] * 10, [[0.75], [0.75]] * 10
    assert said(good, bad).startswith("A better than B by 0.100 [0.075, 0.125], 20 tasks")
    assert said(bad, good).startswith("B better than A by 0.100 [0.075, 0.125], 20 tasks")
    # Equal differences of few tasks do not prove that all tasks have them.
    alike = said([[1.0]] * 20, [[0.0]] * 20)
    assert alike.startswith("A better than B by 1.000 [0.663, 1.000], 20 tasks")
    assert said([[1.0], [0.0]] * 10, [[0.0], [1.0]] * 10).startswith(
        "no difference that 20 tasks can show: A minus B is 0.000 [-"
    )
    assert "fewer than 6 never can" in said([[1.0]] * 5, [[0.0]] * 5)
    assert said([[1.0]], [[0.0]]).startswith("no difference that 1 task can show")


def test_other_tasks_are_never_paired() -> None:
    tasks = (("game", "val.0.0"),)
    first = Pairing(tasks, {"val.0.0": "x"})
    require_same_tasks(first, Pairing(tasks, {"val.0.0": "x"}))
    # An episode that crashed at its reset began with nothing.
    require_same_tasks(first, Pairing(tasks, {}))
    with pytest.raises(EnvironmentsFail, match="1 of 1 tasks began otherwise"):
        require_same_tasks(first, Pairing(tasks, {"val.0.0": "y"}))
    with pytest.raises(EnvironmentsFail, match="tasks are otherwise"):
        require_same_tasks(first, Pairing((), {}))


def test_models_of_one_name_are_told_apart() -> None:
    config = settings_of("quickstart.yaml", "trainer.default_local_dir=/run")
    ours, theirs = a_model(), a_model(run_dir=Path("/other"))
    assert name_in(config, ours) == "global_step_2"
    assert name_in(config, theirs) == "other_global_step_2"
    folders = [a_model("m", given=f"/{place}/m", run_dir=None) for place in ("a", "b")]
    assert distinct_names(config, folders) == ["a_m", "b_m"]
    assert distinct_names(config, [ours, ours]) == ["global_step_2-1", "global_step_2-2"]


def test_the_folder_of_a_run_takes_no_results(tmp_path: Path) -> None:
    require_no_run(tmp_path / "new")
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="folder of a training run"):
        require_no_run(tmp_path)
    # That of an earlier evaluation does.
    (tmp_path / "eval.json").touch()
    require_no_run(tmp_path)


def test_a_checkpoint_and_somebody_elses_config_stay_as_they_are(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run/global_step_2"
    (checkpoint / "actor").mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    for folder in (checkpoint, checkpoint / "actor/new"):
        with pytest.raises(ConfigError, match="lies in the checkpoint"):
            require_no_run(folder)
    mine = tmp_path / "config.yaml"
    for text in ("precious: 1\n", "", "a: [", "trainer: {val_only: false}\n"):
        mine.write_text(text)
        with pytest.raises(ConfigError, match="no evaluation wrote"):
            require_no_run(tmp_path)
    # An evaluation that was interrupted has left this, and is made again.
    mine.write_text("trainer: {val_only: true}\n")
    require_no_run(tmp_path)


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_what_passes_is_a_finite_reward(number: str) -> None:
    with pytest.raises(ConfigError, match="give a finite number"):
        read_words(["a.yaml", "--eval", "m", f"--pass-reward={number}"])


def test_words_of_an_evaluation_are_told_from_the_configurations() -> None:
    argv = ["a.yaml", "--eval", "m", "x.y=1", "--n", "4", "--against=other", "--explain"]
    assert chosen_mode(argv) == "--eval"
    wanted = read_words(argv)
    assert (wanted.models, wanted.n) == (("m", "other"), 4)
    assert wanted.words == ("a.yaml", "x.y=1", "--explain")
    with pytest.raises(ConfigError, match="--n"):
        read_words(["a.yaml", "--eval", "m", "--n", "many"])
    assert chosen_mode(["a.yaml", "agent.name=--eval"]) is None


@pytest.mark.parametrize(
    ("name", "sentence"),
    {
        "nowhere": "there is no",
        "file": "is a file; give the folder",
        "empty": "is no model",
        "global_step_3.0123abcd.incomplete": "half a checkpoint",
        "begun": "not written to the end yet",
        "young": "no checkpoint yet",
        "weightless": "no weights",
    }.items(),
)
def test_what_is_no_model_is_refused_with_what_is_there(
    tmp_path: Path, name: str, sentence: str
) -> None:
    for folder in ("empty", "global_step_3.0123abcd.incomplete", "begun", "young", "weightless"):
        (tmp_path / folder).mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "begun/global_step_3.0123abcd.incomplete").mkdir()
    (tmp_path / "young/metrics.jsonl").touch()
    (tmp_path / "weightless/config.json").write_text("{}")
    with pytest.raises(CannotUse, match=sentence):
        find_model(str(tmp_path / name), PPOConfig())


def test_results_are_strict_json_whatever_numbers_there_are(tmp_path: Path) -> None:
    file = tmp_path / "new/eval.json"
    odd = {"a": float("nan"), "b": [np.float64("inf"), 1.5], "c": (-float("inf"), None), "d": {1}}
    write_json(file, odd)

    def refuse(word: str) -> None:
        raise ValueError(word)

    read = json.loads(file.read_text(), parse_constant=refuse)
    assert read == {"a": "nan", "b": ["inf", 1.5], "c": ["-inf", None], "d": "{1}"}
