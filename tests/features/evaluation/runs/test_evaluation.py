"""Evaluation by `main.py --eval`: the numbers and texts of training's own validation, and refusals.

What it reads stays as it is.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from custom.env import BaseEnvironment
from features.evaluation.evaluated_model import find_model
from features.evaluation.evaluation import evaluate_model, write_evaluation
from main import run
from setup import ConfigStore
from setup import evaluate as api_evaluate
from tests.conftest import PROJECT
from tests.e2e.test_dataset_rows import config_of as rows_config
from tests.e2e.test_training import read_steps, tiny_argv, tiny_config, train
from training.agent_trainer import AgentTrainer
from training.building import build_trainer
from training.config.loader import load_config
from training.run.signals import EndingSignals

VAL = "actor_rollout_ref.rollout.val_kwargs"
SAMPLED = (f"{VAL}.n=2", f"{VAL}.do_sample=true", f"{VAL}.temperature=1")
LORA = (
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.model.lora_alpha=8",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.optim.lr=0.05",
)
KINDS = {"all weights": (), "adapters": LORA, "with values": ("critic.share_backbone=true",)}
VLLM = "actor_rollout_ref.rollout.name=vllm"


def evaluate(*argv: str) -> int:
    return run(list(argv), EndingSignals())


def result_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "eval.json").read_text())


def core(metrics: dict[str, Any]) -> dict[str, Any]:
    """The validation's rewards of a step, with their intervals."""
    return {
        name: value
        for name, value in metrics.items()
        if name.startswith("val-core/") and "/pass@" not in name
    }


@pytest.fixture(scope="module")
def trained(tiny_task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint of each, on prompts."""
    folder = tmp_path_factory.mktemp("trained")
    train(tiny_config(tiny_task, folder, "trainer.save_freq=1", *SAMPLED)).shutdown()
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_the_numbers_of_its_runs_validation(
    tiny_task: Path, tmp_path: Path, kind: str
) -> None:
    own = (*KINDS[kind], *SAMPLED, "trainer.save_freq=2")
    train(tiny_config(tiny_task, tmp_path, *own))
    before = core(read_steps(tmp_path)[-1])
    base = f"{tiny_task}/model"
    words = ("--eval", str(tmp_path), "--against", base, "--out", f"{tmp_path}/out")
    assert evaluate(*tiny_argv(tiny_task, tmp_path, *own), *words) == 0
    out = tmp_path / "out/global_step_2"
    untrained = result_in(tmp_path / "out/model")["by_task"]
    assert [task["rewards"] for task in result_in(out)["by_task"]] != [
        task["rewards"] for task in untrained
    ], "training changed nothing, so that nothing is shown"
    assert core(read_steps(out)[0]) == before
    name = "val-core/guess_the_number/reward/mean@2"
    assert {name, f"{name}/ci_low", f"{name}/ci_high", f"{name}/tasks"} <= before.keys()
    if kind == "adapters":
        adapter = str(tmp_path / "global_step_2/actor/adapter")
        assert evaluate(*tiny_argv(tiny_task, tmp_path, *SAMPLED), "--eval", adapter) == 0
        merged = result_in(tmp_path / "eval/global_step_2_adapter")
        assert core(merged["metrics"])[name] == pytest.approx(before[name], abs=0.05)


def game_argv(task: Path, run_dir: Path, *overrides: str) -> list[str]:
    return [
        "configs/quickstart.yaml",
        f"actor_rollout_ref.model.path={task}/model",
        f"trainer.default_local_dir={run_dir}",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "agent.val_length=6",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
        "trainer.logger=file",
        "trainer.deterministic=true",
        *SAMPLED,
        *overrides,
    ]


def texts(file: Path) -> list[Any]:
    episodes = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        (episode["env_seed"], episode["reward"], [turn["text"] for turn in episode["turns"]])
        for episode in episodes
    ]


def test_a_game_is_played_as_in_the_runs_validation_to_the_word(
    tiny_game: Path, tmp_path: Path
) -> None:
    argv = game_argv(tiny_game, tmp_path, f"records.folder={tmp_path}/episodes")
    trainer = build_trainer(load_config(argv).config)
    assert isinstance(trainer, AgentTrainer)
    trainer.fit()
    trainer.shutdown()
    assert evaluate(*argv, "--eval", str(tmp_path / "global_step_2")) == 0
    out = tmp_path / "eval/global_step_2"
    played = texts(out / "episodes/val-2.jsonl")
    assert len(played) == 12
    assert played == texts(tmp_path / "episodes/val-2.jsonl")
    step = read_steps(tmp_path)[-1]
    ours = read_steps(out)[0]
    assert {name: ours[name] for name in step if name.startswith("val-")} == {
        name: value for name, value in step.items() if name.startswith("val-")
    }
    assert result_in(out)["endings"].keys() <= {"done", "max_turns"}


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "eval" not in path.relative_to(folder).parts
    }


def test_two_models_get_the_same_tasks_and_the_run_stays_as_it_is(
    tiny_task: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = digests(trained)
    argv = tiny_argv(tiny_task, trained)
    words = ("--eval", f"{trained}/global_step_2", "--against", f"{tiny_task}/model", "--n", "4")
    assert evaluate(*argv, *words) == 0
    folder = trained / "eval/global_step_2-against-model"
    first, second = result_in(folder / "global_step_2"), result_in(folder / "model")
    assert [task["uid"] for task in first["by_task"]] == [task["uid"] for task in second["by_task"]]
    means = [
        sum(sum(task["rewards"]) / 4 for task in result["by_task"]) / 16
        for result in (first, second)
    ]
    [difference] = result_in(folder)["differences"].values()
    assert difference["value"] == pytest.approx(means[0] - means[1])
    assert difference["low"] <= difference["value"] <= difference["high"]
    said = capsys.readouterr().out
    assert ("better than" in said) == difference["shown"]
    assert digests(trained) == before


def test_a_model_does_not_differ_from_itself(
    tiny_task: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = f"{trained}/global_step_1"
    argv = tiny_argv(tiny_task, trained, f"{VAL}.temperature=1")
    assert evaluate(*argv, "--eval", step, "--against", step, "--out", str(tmp_path)) == 0
    assert "no difference that 16 tasks can show" in capsys.readouterr().out
    [difference] = result_in(tmp_path)["differences"].values()
    assert (difference["value"], difference["tasks_better"], difference["shown"]) == (0, 0, False)


def test_an_environment_that_crashes_is_counted_and_said(
    tiny_game: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fragile = (
        f"agent.environment.path={PROJECT}/tests/e2e/agent_games.py",
        "agent.environment.cls=Fragile",
        "agent.max_refills=0",
        "agent.val_length=8",
    )
    argv = game_argv(tiny_game, tmp_path, *fragile)
    assert evaluate(*argv, "--eval", f"{tiny_game}/model", "--n", "1") == 0
    result = result_in(tmp_path / "eval/model")
    assert 0 < result["failed_episodes"] < 8
    assert result["endings"]["env_crash"] == result["failed_episodes"]
    assert "episodes failed and have reward 0" in capsys.readouterr().out


def test_rows_with_tools_are_played_as_in_the_runs_validation(
    tiny_task: Path, tmp_path: Path
) -> None:
    config = rows_config(tiny_task, tmp_path, "trainer.save_freq=2", *SAMPLED)
    train(config).shutdown()
    run_dir = tmp_path / "run"
    evaluation = evaluate_model(config, find_model(str(run_dir), config), tmp_path / "out")
    assert core(evaluation.metrics) == core(read_steps(run_dir)[-1])
    result = write_evaluation(evaluation, tmp_path / "out")
    assert list(result["sources"]) == ["counts", "sums", "all"]


def test_two_ranks_evaluate_three_tasks_as_one_rank_does(
    tiny_task: Path, trained: Path, tmp_path: Path, cluster: None
) -> None:
    results = []
    for ranks in (1, 2):
        argv = tiny_argv(
            tiny_task, trained, f"trainer.n_gpus_per_node={ranks}", "data.val_max_samples=3"
        )
        words = ("--eval", f"{trained}/global_step_2", "--out", f"{tmp_path}/{ranks}")
        assert evaluate(*argv, *words) == 0
        results.append(result_in(tmp_path / f"{ranks}")["by_task"])
    assert results[0] == results[1]
    assert len(results[0]) == 3


def half(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def damaged(checkpoint: Path) -> None:
    [file] = (checkpoint / "actor/model").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)


def of_other_vocabulary(checkpoint: Path) -> None:
    """The weights' own configuration says that there are fewer tokens than the tokenizer has."""
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 8}))


FAULTS = {
    "half a checkpoint": ("global_step_2", half),
    "is damaged": ("global_step_2", damaged),
    "the model knows 8": ("model", of_other_vocabulary),
}


@pytest.mark.parametrize("sentence", FAULTS)
def test_what_is_no_whole_model_is_refused_with_a_sentence(
    tiny_task: Path,
    trained: Path,
    tmp_path: Path,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, break_it = FAULTS[sentence]
    source = trained if name.startswith("global") else tiny_task
    shutil.copytree(source / name, tmp_path / name)
    break_it(tmp_path / name)
    argv = tiny_argv(tiny_task, tmp_path / "run")
    assert evaluate(*argv, "--eval", str(tmp_path / name)) in (2, 3)
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.rglob("eval.json"))


def test_a_run_is_evaluated_by_its_folder_alone_and_at_its_latest_whole_checkpoint(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    damaged(tmp_path / "run/global_step_2")
    out = tmp_path / "out"
    words = ("--eval", str(tmp_path / "run"), "--out", str(out), "trainer.logger=file")
    assert evaluate(*words) == 0
    assert result_in(out)["step"] == 1
    # The reward of this project may be asked for by a run; one that lies elsewhere may not.
    elsewhere = tmp_path / "reward.py"
    shutil.copy(PROJECT / "examples/tiny_prompts_reward.py", elsewhere)
    config = tmp_path / "run/config.yaml"
    own = str(PROJECT / "examples/tiny_prompts_reward.py")
    assert own in config.read_text()
    config.write_text(config.read_text().replace(own, str(elsewhere)))
    assert evaluate(*words) == 2
    assert "asks for custom_reward_function.path=" in capsys.readouterr().err


@pytest.mark.vllm
def test_vllm_gets_the_weights_of_a_checkpoint_and_those_of_another_after_them(
    tiny_task: Path, trained: Path, tmp_path: Path
) -> None:
    """Greedy answers of float32 weights are those of the transformers engine."""
    pytest.importorskip("vllm")
    words = ("--eval", f"{trained}/global_step_2", "--against", f"{tiny_task}/model")
    results = []
    for engine in ("hf", "vllm"):
        argv = tiny_argv(tiny_task, trained, f"actor_rollout_ref.rollout.name={engine}")
        assert evaluate(*argv, *words, "--out", str(tmp_path / engine)) == 0
        rewards = []
        for name in ("global_step_2", "model"):
            result = result_in(tmp_path / engine / name)
            rewards.append([task["rewards"] for task in result["by_task"]])
        results.append(rewards)
    assert results[0] == results[1]
    assert results[0][0] != results[0][1], "the two models answer alike: nothing is shown"


class Even(BaseEnvironment):
    """Pays 1 for an even number."""

    def reset(self, seed: int | None = None) -> str:
        return "guess"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        word = action.split()[-1] if action.split() else ""
        return "higher", float(word.isdigit() and int(word) % 2 == 0), True, {}


def test_a_script_evaluates_an_environment_and_a_dataset(tiny_game: Path, tmp_path: Path) -> None:
    config = ConfigStore()
    config.model.model_name = f"{tiny_game}/model"
    config.inference.backend = "hf"
    config.inference.max_tokens = 6
    config.inference.max_prompt_length = 20
    config.inference.max_response_length = 20
    config.checkpoint.output_dir = str(tmp_path)
    played = api_evaluate(config, f"{tiny_game}/model", Even(), n=4, tasks=5)
    assert (played["tasks"], played["episodes"]) == (5, 20)
    assert (tmp_path / "eval/model/eval.json").exists()
    answered = api_evaluate(
        config,
        f"{tiny_game}/model",
        dataset=["above 4", "below 7", "guess"],
        reward_fn=lambda trajectory: 0.25,
        out=tmp_path / "rows",
        pass_reward=0.25,
    )
    [source] = answered["sources"].values()
    assert (source["mean"]["value"], source["pass@1"]["value"]) == (0.25, 1.0)


def test_an_evaluation_that_is_broken_off_leaves_no_result_of_another(
    trained: Path, tiny_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*tiny_argv(tiny_task, trained), "--out", str(tmp_path), "--eval")
    assert evaluate(*words, f"{trained}/global_step_1") == 0
    with monkeypatch.context() as patched:
        patched.setattr("features.evaluation.evaluation._play", interrupted)
        with pytest.raises(KeyboardInterrupt):
            evaluate(*words, f"{trained}/global_step_2")
    assert not (tmp_path / "eval.json").exists()
    assert (tmp_path / "eval.json.old").is_file() and (tmp_path / "metrics.jsonl.old").is_file()
    # The folder is still known for an evaluation's.
    assert evaluate(*words, f"{trained}/global_step_2") == 0
    assert result_in(tmp_path)["step"] == 2


def interrupted(*arguments: object) -> None:
    raise KeyboardInterrupt
