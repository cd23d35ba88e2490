"""Whole runs with a teacher: what it is told, kills, LoRA, prompts, and what cannot be."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from prepare_codes import prepare

from main import run
from tests.conftest import PROJECT
from tests.e2e.test_resume import finish, run_and_kill, tensors
from tests.e2e.test_training import read_steps
from tests.needed_features import needs_features
from training.run.signals import EndingSignals

STEPS = 3
SHORT = (
    "agent.val_length=8",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=4",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.save_freq=1",
    "trainer.deterministic=true",
    "trainer.logger=[file]",
)


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("codes") / "made"
    prepare(folder, seed=0, steps=60)
    return folder


def words(codes: Path, run_dir: Path, *more: str) -> list[str]:
    return [
        str(PROJECT / "configs/codes.yaml"),
        f"agent.environment.path={PROJECT}/examples/codes_game.py",
        f"actor_rollout_ref.model.path={codes}/model",
        f"teacher.model={codes}/model",
        f"trainer.default_local_dir={run_dir}",
        f"trainer.total_training_steps={STEPS}",
        *SHORT,
        *more,
    ]


def steps_of(codes: Path, run_dir: Path, *more: str) -> list[dict[str, Any]]:
    assert run(words(codes, run_dir, *more), EndingSignals()) == 0
    steps = [step for step in read_steps(run_dir) if step["step"] > 0]
    assert len(steps) == STEPS
    return steps


LOSSES = {
    "advantage": ("teacher.loss=advantage",),
    "sampled": ("teacher.loss=sampled",),
    "top_k": ("teacher.loss=top_k", "teacher.top_k=4"),
}


@pytest.mark.seconds
@pytest.mark.parametrize("loss", LOSSES)
def test_a_teacher_that_is_told_the_hint_is_learnt_from(
    codes: Path, tmp_path: Path, loss: str
) -> None:
    model = f"teacher.model={codes}/model"
    steps = steps_of(codes, tmp_path, model, *LOSSES[loss])
    for step in steps:
        assert step["teacher/rows"] == 1.0 and step["teacher/kl"] != 0
        # The question has 8 tokens, and the hint two.
        assert step["teacher/prompt_tokens/max"] == 10
        assert step["timing_s/teacher"] > 0
        assert ("actor/teacher_loss" in step) == (loss != "advantage")
        assert ("teacher/advantage" in step) == (loss == "advantage")
        # Nothing of the hint is sampled or trained on.
        assert step["prompt_length/max"] == 8


@pytest.mark.seconds
def test_the_numbers_of_a_run_without_a_teacher_have_nothing_of_it(
    codes: Path, tmp_path: Path
) -> None:
    steps = steps_of(codes, tmp_path, "teacher.model=null")
    assert not any("teacher" in name for step in steps for name in step)
    assert not (tmp_path / f"global_step_{STEPS}/actor/beside").exists()


@pytest.mark.seconds
@pytest.mark.parametrize("lora", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_with_the_same_average_bitwise(
    codes: Path, tmp_path: Path, lora: int
) -> None:
    more = (
        "teacher.model=ema",
        "teacher.ema_decay=0.9",
        f"actor_rollout_ref.model.lora_rank={lora}",
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish([sys.executable, str(PROJECT / "main.py"), *words(codes, whole, *more)])
    argv = [sys.executable, str(PROJECT / "main.py"), *words(codes, broken, *more)]
    run_and_kill(argv, broken, random.Random(3))
    finish(argv)
    for part in ("actor/model", "actor/optimizer", "actor/beside/teacher"):
        one, other = (tensors(each / f"global_step_{STEPS}" / part) for each in (whole, broken))
        assert one and one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), part
    model = tensors(whole / f"global_step_{STEPS}/actor/model")
    average = tensors(whole / f"global_step_{STEPS}/actor/beside/teacher")
    assert average.keys() == model.keys(), "what trains, adapters alone with LoRA"
    assert any(not torch.equal(average[name], model[name]) for name in model)


@pytest.mark.seconds
def test_a_run_that_had_no_average_begins_one_from_its_weights(
    codes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps_of(codes, tmp_path, "teacher.model=null")
    goes_on = ("teacher.model=ema", "trainer.resume_with_changes=true")
    longer = words(codes, tmp_path, *goes_on, f"trainer.total_training_steps={STEPS + 1}")
    assert run(longer, EndingSignals()) == 0
    assert "holds no beside/teacher" in caplog.text
    assert tensors(tmp_path / f"global_step_{STEPS + 1}/actor/beside/teacher")


MULTI_TURN = """
def tell(row):
    assert row.messages[0]["role"] == "user" and row.columns["env_seed"] is not None
    first = dict(row.messages[0], content=row.messages[0]["content"] + " lower")
    return [first, *row.messages[1:]]
"""


@pytest.mark.seconds
def test_conversations_of_several_turns_are_taught(tiny_game: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MULTI_TURN)
    argv = [
        str(PROJECT / "configs/quickstart.yaml"),
        f"actor_rollout_ref.model.path={tiny_game}/model",
        f"agent.environment.path={PROJECT}/examples/quickstart_game.py",
        f"trainer.default_local_dir={tmp_path}/run",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.total_training_steps=2",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.logger=[file]",
        "teacher.model=policy",
        f"teacher.context={tmp_path}/mine.py:tell",
        "teacher.loss=top_k",
        "teacher.divergence=forward_kl",
        "teacher.where=failed",
    ]
    assert run(argv, EndingSignals()) == 0
    steps = [step for step in read_steps(tmp_path / "run") if step["step"] > 0]
    rows = [step["teacher/rows"] for step in steps]
    assert all(0 < share <= 1 for share in rows) and min(rows) < 1
    assert all(step["actor/teacher_loss"] > 0 for step in steps), steps


@pytest.mark.seconds
def test_answers_to_prompts_are_taught_behind_the_rows_messages(
    tiny_task: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "from features.teacher.contexts import with_text\n\n\n"
        "def tell(row):\n"
        "    return with_text(row.messages, str(row.columns['reward_model']['ground_truth']))\n"
    )
    argv = [
        str(PROJECT / "configs/tiny_prompts.yaml"),
        f"actor_rollout_ref.model.path={tiny_task}/model",
        f"data.train_files={tiny_task}/train.parquet",
        f"data.val_files={tiny_task}/val.parquet",
        f"custom_reward_function.path={PROJECT}/examples/tiny_prompts_reward.py",
        f"trainer.default_local_dir={tmp_path}/run",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.logger=[file]",
        "teacher.model=policy",
        f"teacher.context={tmp_path}/mine.py:tell",
    ]
    with pytest.raises(SystemExit):
        run_refused(argv)
    assert run([*argv, "data.return_raw_chat=true"], EndingSignals()) == 0
    (step,) = [step for step in read_steps(tmp_path / "run") if step["step"] > 0]
    assert step["teacher/rows"] == 1.0 and step["teacher/advantage"] > 0


def run_refused(argv: list[str]) -> None:
    """Requires that a config is refused."""
    if run(argv, EndingSignals()) != 0:
        raise SystemExit


@pytest.mark.seconds
def test_a_model_of_another_vocabulary_is_refused_before_the_first_step(
    codes: Path, tiny_game: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = words(codes, tmp_path, f"teacher.model={tiny_game}/model")
    assert run(argv, EndingSignals()) != 0
    told = capsys.readouterr().err
    assert "has another vocabulary than" in told and "teacher.model=" in told
    assert "Traceback" not in told


FAULTS = {
    "raises": ("return 1 / 0", "raised ZeroDivisionError"),
    "returns nothing of use": ("return []", "returned []"),
    "is too long": (
        "return [{'role': 'user', 'content': 'code ' * 300}]",
        "set teacher.too_long=leave_out",
    ),
}


@pytest.mark.seconds
@pytest.mark.parametrize("fault", FAULTS)
def test_a_context_that_fails_ends_the_run_with_a_sentence(
    codes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    body, sentence = FAULTS[fault]
    (tmp_path / "mine.py").write_text(f"def tell(row):\n    {body}\n")
    argv = words(codes, tmp_path / "run", f"teacher.context={tmp_path}/mine.py:tell")
    assert run(argv, EndingSignals()) != 0
    told = capsys.readouterr().err
    assert sentence in told and "Traceback" not in told


@pytest.mark.seconds
def test_a_hint_of_the_reset_alone_reaches_the_teacher(codes: Path, tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(
        "from codes_game import HINT, Codes, code_of\n\n\n"
        "class Early(Codes):\n"
        "    def reset(self, seed=None):\n"
        "        text = super().reset(seed)\n"
        "        return text, {'hint': f'{HINT} {code_of(self.name)[0]}'}\n\n"
        "    def step(self, action):\n"
        "        return *super().step(action)[:3], {}\n"
    )
    early = (f"agent.environment.path={tmp_path}/early.py", "agent.environment.cls=Early")
    for step in steps_of(codes, tmp_path / "run", *early):
        assert step["teacher/rows"] == 1.0 and step["teacher/prompt_tokens/max"] == 10
        assert step["prompt_length/max"] == 8


ASKED_FOR = """
def tell(row):
    return [*row.messages[:-1], dict(row.messages[-1], content=row.messages[-1]["content"] + " 4")]
"""


@pytest.mark.seconds
@needs_features("policy_calls")
def test_rows_that_an_environment_asked_for_are_taught(tiny_game: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ASKED_FOR)
    argv = [
        str(PROJECT / "configs/quickstart.yaml"),
        f"actor_rollout_ref.model.path={tiny_game}/model",
        f"agent.environment.path={PROJECT}/tests/features/policy_calls/guess_with_help.py",
        "agent.environment.cls=GuessWithHelp",
        "policy_calls.enable=true",
        "policy_calls.max_tokens=4",
        f"trainer.default_local_dir={tmp_path}/run",
        "data.train_batch_size=8",
        "data.max_prompt_length=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.logger=[file]",
        "teacher.model=policy",
        f"teacher.context={tmp_path}/mine.py:tell",
    ]
    assert run(argv, EndingSignals()) == 0
    (step,) = [step for step in read_steps(tmp_path / "run") if step["step"] > 0]
    assert step["teacher/rows"] == 1.0 and step["policy_calls/per_episode/mean"] >= 3
