"""Whole runs that learn given conversations: alone, beside what is played, killed, on two ranks."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from features.records.episode_files import read_episodes
from features.records.select import main as select
from features.sft.data_files import RowReader
from features.sft.settings import SFTSettings
from main import main, run
from tests.conftest import PROJECT
from tests.e2e.test_resume import finish, metrics, run_and_kill, tensors
from tests.e2e.test_training import read_steps
from tests.features.sft.test_loss import by_hand
from training.config.loader import load_config
from training.run.signals import EndingSignals
from workers.turn_reading import turn_tokens

GUESSES = [
    [("guess", "5"), ("higher", "8"), ("lower", "7")],
    [("guess", "5"), ("lower", "2")],
    [("guess", "4"), ("higher", "9")],
    [("guess", "5")],
]


def write_conversations(path: Path) -> Path:
    lines = []
    for turns in GUESSES:
        messages = []
        for asked, answer in turns:
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": answer})
        lines.append(json.dumps({"messages": messages}) + "\n")
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("conversations") / "data.jsonl")


def words(game: Path, run_dir: Path, *more: str) -> list[str]:
    """A small run of the quickstart's game."""
    return [
        str(PROJECT / "configs/quickstart.yaml"),
        f"actor_rollout_ref.model.path={game}/model",
        f"agent.environment.path={PROJECT}/examples/quickstart_game.py",
        f"trainer.default_local_dir={run_dir}",
        "agent.val_length=4",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "sft.batch_size=2",
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "trainer.deterministic=true",
        "trainer.logger=[file]",
        *more,
    ]


def do(argv: list[str]) -> int:
    return run(argv, EndingSignals())


@pytest.fixture(scope="module")
def played(tiny_game: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("played")
    assert do(words(tiny_game, folder, "trainer.total_training_steps=2")) == 0
    return folder


def test_a_conversation_has_the_tokens_and_the_mask_of_the_rollout_that_made_it(
    tiny_game: Path, played: Path
) -> None:
    """What was sampled, as recorded; its texts, read anew as conversations."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_game / "model")
    config = load_config(words(tiny_game, played), check=False).config
    tokens = turn_tokens(config, tokenizer, [tokenizer.eos_token_id])
    reader = RowReader(SFTSettings(), tokens, 1000, len(tokenizer))
    compared = 0
    for episode in read_episodes(played / "episodes/1.jsonl"):
        if any(turn["finish_reason"] == "length" for turn in episode["turns"]):
            continue
        messages = list(episode["initial_messages"])
        for turn in episode["turns"]:
            messages.append({"role": "assistant", "content": turn["text"]})
            messages += turn["observation"]
        (row,) = reader.rows_of({"messages": messages})
        (sampled,) = episode["rows"]
        ids = [*sampled["prompt_ids"].tolist(), *sampled["response_ids"].tolist()]
        mask = [0] * len(sampled["prompt_ids"]) + sampled["response_mask"].tolist()
        end = len(mask) - mask[::-1].index(1)
        assert row.ids == ids[:end] and row.mask == mask[:end]
        compared += len(episode["turns"])
    assert compared > 8


def test_a_run_learns_saves_and_its_model_trains_on(
    tiny_game: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = f"sft.val_files=[{data}]"
    argv = words(tiny_game, tmp_path, "sft.epochs=4", held_out, "trainer.test_freq=4")
    assert do([*argv, "--sft", str(data)]) == 0
    steps = read_steps(tmp_path / "sft")
    losses = [step["sft/val_loss"] for step in steps if "sft/val_loss" in step]
    assert len(steps) == 9 and len(losses) == 3 and losses[-1] < losses[1] < losses[0]
    assert steps[1]["sft/tokens"] > 0 and steps[-1]["training/epoch"] == 3
    # Before the first step the loss is that of the model as it lies there, by hand.
    tokenizer = AutoTokenizer.from_pretrained(tiny_game / "model")
    config = load_config(argv, check=False).config
    tokens = turn_tokens(config, tokenizer, [tokenizer.eos_token_id])
    rows = RowReader(SFTSettings(), tokens, 1000, len(tokenizer)).read([str(data)])
    for model, loss in ((tiny_game / "model", losses[0]), (tmp_path / "sft/model", losses[-1])):
        lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        with torch.no_grad():
            assert by_hand(lm, rows).item() == pytest.approx(loss, rel=1e-4)
    page = (tmp_path / "sft/report.html").read_text()
    assert "Loss of given conversations" in page
    assert "actor_rollout_ref.model.path=" in capsys.readouterr().out
    further = f"actor_rollout_ref.model.path={tmp_path}/sft/model"
    assert do([*argv, further, "trainer.total_training_steps=1"]) == 0
    assert do([*argv, "--eval", str(tmp_path / "sft")]) == 0


def test_selected_episodes_are_learnt(tiny_game: Path, played: Path, tmp_path: Path) -> None:
    best = tmp_path / "best.parquet"
    told = [str(played), "--where", "reward >= 0 and turns < 9", "--per-task", "2"]
    assert select([*told, "--out", str(best)]) == 0
    argv = words(tiny_game, tmp_path / "run", "sft.epochs=1", "sft.batch_size=4")
    assert do([*argv, "--sft", str(best)]) == 0
    assert read_steps(tmp_path / "run/sft")[-1]["actor/sft_loss"] > 0


def test_adapters_alone_are_learnt(tiny_game: Path, data: Path, tmp_path: Path) -> None:
    argv = words(tiny_game, tmp_path, "sft.steps=6", "actor_rollout_ref.model.lora_rank=4")
    assert do([*argv, "--sft", str(data)]) == 0
    names = tensors(tmp_path / "sft/global_step_6/actor/model")
    assert names and all("lora" in name for name in names)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "sft/model").state_dict()
    before = AutoModelForCausalLM.from_pretrained(tiny_game / "model").state_dict()
    assert merged.keys() == before.keys()
    assert any(not torch.equal(merged[name], before[name]) for name in merged)


def untimed(run_dir: Path) -> list[dict[str, Any]]:
    steps = metrics(run_dir)
    return [{name: step[name] for name in step if "seconds" not in name} for step in steps]


def same_end(one: Path, other: Path, step: int, parts: tuple[str, ...]) -> None:
    for part in parts:
        folders = [run_dir / f"global_step_{step}" / part for run_dir in (one, other)]
        first, second = (tensors(folder) for folder in folders)
        assert first.keys() == second.keys()
        assert not [name for name in first if not torch.equal(first[name], second[name])]
    assert untimed(one) == untimed(other)


def killed_and_whole(
    tmp_path: Path, argv_of: Any, seed: int, run_of: Any = lambda folder: folder
) -> None:
    finish(argv_of(tmp_path / "whole"))
    rng = random.Random(seed)
    broken = argv_of(tmp_path / "broken")
    for _ in range(2):
        if run_and_kill(broken, run_of(tmp_path / "broken"), rng):
            break
    finish(broken)


def test_a_killed_supervised_run_ends_bitwise_like_one_that_was_not(
    tiny_game: Path, data: Path, tmp_path: Path
) -> None:
    def argv_of(folder: Path) -> list[str]:
        told = words(tiny_game, folder, "sft.steps=40", f"sft.val_files=[{data}]")
        return [sys.executable, str(PROJECT / "main.py"), *told, "--sft", str(data)]

    killed_and_whole(tmp_path, argv_of, 0, lambda folder: folder / "sft")
    runs = (tmp_path / "whole/sft", tmp_path / "broken/sft")
    same_end(*runs, 40, ("actor/model", "actor/optimizer"))


def test_a_killed_run_that_learns_beside_ends_bitwise_like_one_that_was_not(
    tiny_game: Path, data: Path, tmp_path: Path
) -> None:
    def argv_of(folder: Path) -> list[str]:
        beside = (f"sft.files=[{data}]", "sft.loss_coef=0.5", "trainer.total_training_steps=6")
        return [sys.executable, str(PROJECT / "main.py"), *words(tiny_game, folder, *beside)]

    killed_and_whole(tmp_path, argv_of, 1)
    runs = (tmp_path / "whole", tmp_path / "broken")
    same_end(*runs, 6, ("actor/model", "actor/optimizer", "critic/model"))
    assert all("actor/sft_loss" in step for step in read_steps(tmp_path / "whole")[1:])


def test_without_a_coefficient_nothing_is_read_or_learnt(
    tiny_game: Path, tmp_path: Path, played: Path
) -> None:
    told = ("trainer.total_training_steps=2", "sft.files=[/nowhere.jsonl]")
    assert do(words(tiny_game, tmp_path / "named", *told)) == 0
    same_end(played, tmp_path / "named", 2, ("actor/model", "actor/optimizer", "critic/model"))


def test_groups_that_are_trained_as_they_end_learn_the_rows_once_a_step(
    tiny_game: Path, data: Path, tmp_path: Path
) -> None:
    argv = words(
        tiny_game,
        tmp_path,
        f"sft.files=[{data}]",
        "sft.loss_coef=0.5",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_epochs=1",
        "trainer.train_finished_groups=true",
        "trainer.total_training_steps=2",
    )
    assert do(argv) == 0
    assert all(0 < step["actor/sft_loss"] < 10 for step in read_steps(tmp_path)[1:])


def test_a_run_that_goes_on_with_other_rows_is_refused(
    tiny_game: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = words(tiny_game, tmp_path, "sft.steps=2")
    own = tmp_path / "own.jsonl"
    shutil.copy(data, own)
    assert main([*argv, "--sft", str(own)]) == 0
    own.write_text("".join(own.read_text().splitlines(keepends=True)[::-1]))
    argv = [word if word != "sft.steps=2" else "sft.steps=4" for word in argv]
    assert main([*argv, "--sft", str(own)]) == 3
    assert "was trained on other rows than those of sft.files now" in capfd.readouterr().err
    assert main([*argv, "--sft", str(own), "trainer.resume_with_changes=true"]) == 0
    assert len(read_steps(tmp_path / "sft")) >= 4


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (["--sft"], "--sft has nothing to learn from: name a file"),
        (["--sft", "/nowhere.jsonl"], "sft.files=/nowhere.jsonl is not a file"),
        (["--sft", "DATA", "sft.batch_size=9"], "sft.batch_size=9 is more than the 4 rows"),
        (
            ["--sft", "DATA", "sft.batch_size=3", "trainer.n_gpus_per_node=2"],
            "sft.batch_size=3 rows do not divide among 2 ranks",
        ),
        (["--sft", "DATA", "sft.max_length=9"], "has a row of 24 tokens, more than 9"),
        (["--sft", "DATA", "sft.messages_key=talk"], "has neither talk, nor prompt and answer"),
        (["--sft", "DATA", "sft.trained_roles=[tool]"], "has no token to learn: 4 rows have none"),
        (["--sft", "DATA", "sft.val_files=[x.jsonl]"], "sft.val_files=x.jsonl is not a file"),
    ],
)
def test_what_cannot_be_learnt_is_told_before_a_model_is_loaded(
    tiny_game: Path,
    data: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    told: list[str],
    says: str,
) -> None:
    argv = [str(data) if word == "DATA" else word for word in told]
    assert main([*words(tiny_game, tmp_path), *argv]) == 2
    assert says in capfd.readouterr().err
    assert not (tmp_path / "sft").exists()


@pytest.mark.slow
def test_two_ranks_learn_as_one_does(tiny_game: Path, data: Path, tmp_path: Path) -> None:
    runs = {}
    for ranks in (1, 2):
        own = words(tiny_game, tmp_path / str(ranks), f"trainer.n_gpus_per_node={ranks}")
        told = [*own, "sft.steps=6", "sft.batch_size=2", "--sft", str(data)]
        finish([sys.executable, str(PROJECT / "main.py"), *told])
        runs[ranks] = read_steps(tmp_path / str(ranks) / "sft")
    for one, two in zip(runs[1], runs[2], strict=True):
        assert two["actor/sft_loss"] == pytest.approx(one["actor/sft_loss"], rel=1e-4)
        assert two["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-3)
