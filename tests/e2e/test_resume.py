"""Exact resume: a run that is killed and started again ends bitwise like one that was not."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.conftest import PROJECT
from tests.e2e.test_training import read_steps, tiny_config
from training.building import build_trainer
from training.config import PPOConfig
from training.run.checkpoint_folders import saved_steps

STEPS = 8
# Alarms look at throughput, too.
TIMINGS = ("timing", "perf/", "alarms/")


def command(
    task: Path, run_dir: Path, engine: str, ranks: int = 1, steps: int = STEPS
) -> list[str]:
    return [
        sys.executable,
        str(PROJECT / "main.py"),
        str(PROJECT / "configs/tiny_prompts.yaml"),
        f"data.train_files={task}/train.parquet",
        f"data.val_files={task}/val.parquet",
        f"actor_rollout_ref.model.path={task}/model",
        f"custom_reward_function.path={PROJECT}/examples/tiny_prompts_reward.py",
        f"trainer.default_local_dir={run_dir}",
        "data.train_batch_size=24",  # 64 rows: the epochs end inside the run
        "actor_rollout_ref.actor.ppo_mini_batch_size=12",
        "actor_rollout_ref.actor.shuffle=true",
        f"actor_rollout_ref.rollout.name={engine}",
        "actor_rollout_ref.rollout.max_num_seqs=32",
        f"trainer.n_gpus_per_node={ranks}",
        f"trainer.total_training_steps={steps}",
        "trainer.deterministic=true",
        "trainer.save_freq=1",
        "trainer.test_freq=3",
        "trainer.max_actor_ckpt_to_keep=2",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "trainer.logger=[file,tensorboard]",
    ]


def steps_logged(run_dir: Path) -> int:
    # A run that starts anew sets the file aside, at any moment.
    try:
        return len((run_dir / "metrics.jsonl").read_text().splitlines())
    except FileNotFoundError:
        return 0


def run_and_kill(argv: list[str], run_dir: Path, rng: random.Random) -> bool:
    """Starts the run and kills it at a random moment after its first new step.

    Returns True where it had ended before.
    """
    process = subprocess.Popen(
        argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=own_environment()
    )
    before = steps_logged(run_dir)
    while process.poll() is None and steps_logged(run_dir) <= before:
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.6))
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors
    return process.returncode == 0


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(item.size, dtype=item.properties.dtype) for name, item in metadata.items()
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(TIMINGS)} for line in lines]


def assert_same_end(one: Path, other: Path, steps: int = STEPS) -> None:
    for part in ("actor/model", "actor/optimizer", "critic/model", "critic/optimizer"):
        a, b = (
            tensors(one / f"global_step_{steps}" / part),
            tensors(other / f"global_step_{steps}" / part),
        )
        assert a.keys() == b.keys()
        different = [name for name in a if not torch.equal(a[name], b[name])]
        assert not different, f"{part}: {different}"
    assert metrics(one) == metrics(other)
    assert [line["step"] for line in metrics(one)] == list(range(steps + 1))


def listen_to_ctrl_c() -> None:
    """Listens as from a terminal.

    What a shell starts in the background, a whole test run perhaps, inherits that SIGINT is
    ignored, and with nohup SIGHUP.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def own_environment() -> dict[str, str]:
    """Without the port on which an engine of this process's, of another test, may still listen."""
    return {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}


def finish(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, env=own_environment())
    assert done.returncode == 0, done.stderr[-5000:]


def check_kills(
    task: Path, folder: Path, engine: str, kills: int, seed: int, ranks: int = 1, steps: int = STEPS
) -> None:
    rng = random.Random(seed)
    whole, broken = folder / "whole", folder / "broken"
    argv = command(task, whole, engine, ranks, steps)
    finish(argv)
    argv = command(task, broken, engine, ranks, steps)
    killed = in_a_save = 0
    while killed < kills:
        if run_and_kill(argv, broken, rng):
            break
        killed += 1
        in_a_save += bool(list(broken.glob("*.incomplete")))
    print(f"{killed} kills, {in_a_save} of them in a save")
    assert killed >= kills // 2
    finish(argv)
    assert_same_end(whole, broken, steps)
    assert not list(broken.glob("*.incomplete"))
    assert len(list(broken.glob("global_step_*"))) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    "engine", ["hf", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])]
)
def test_a_killed_run_ends_bitwise_like_one_that_was_not(tiny_task, tmp_path, engine) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm")
    check_kills(tiny_task, tmp_path, engine, kills=2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_kills_at_many_moments_change_nothing(tiny_task, tmp_path, engine, seed) -> None:
    check_kills(tiny_task, tmp_path, engine, kills=6, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_twenty_kills_change_nothing(tiny_task, tmp_path, ranks) -> None:
    check_kills(tiny_task, tmp_path, "hf", kills=20, seed=5, ranks=ranks, steps=40)


def fit(config: PPOConfig) -> None:
    trainer = build_trainer(config)
    trainer.init_workers()
    trainer.fit()


def test_another_estimator_and_schedule_are_refused_or_said(tiny_task, tmp_path, caplog) -> None:
    save = ("data.val_files=null", "trainer.save_freq=1", "actor_rollout_ref.rollout.n=2")
    fit(
        tiny_config(
            tiny_task,
            tmp_path,
            *save,
            "algorithm.adv_estimator=grpo",
            "trainer.total_training_steps=1",
        )
    )
    changed = (
        *(*save, "algorithm.adv_estimator=gae", "trainer.total_training_steps=2"),
        "actor_rollout_ref.actor.optim.lr=0.5",
    )
    with pytest.raises(
        FileNotFoundError, match=r"none with actor, critic.*resume_with_changes=true"
    ):
        fit(tiny_config(tiny_task, tmp_path, *changed))
    assert not (tmp_path / "config.1.yaml").exists(), "what is refused changes nothing"
    fit(tiny_config(tiny_task, tmp_path, *changed, "trainer.resume_with_changes=true"))
    assert "holds no critic, which starts anew" in caplog.text
    assert "algorithm.adv_estimator: grpo -> gae" in caplog.text
    assert "the learning rate jumps from 5e-05 to 0.2625" in caplog.text, (
        "a cosine's end, and the middle of another"
    )
    assert [step["step"] for step in read_steps(tmp_path)] == [1, 2]
    assert (tmp_path / "config.1.yaml").read_text().startswith("# steps 1 to 1\n")


BROKEN_REWARDS = """
from examples.tiny_prompts_reward import compute_score as sound

CALLS = []


def compute_score(data_source, solution_str, ground_truth, extra_info):
    CALLS.append(solution_str)
    # The reward function is tried, then 8 prompts of a step are scored.
    if len(CALLS) > 8 * 3:
        raise KeyError("no such answer")
    return sound(data_source, solution_str, ground_truth, extra_info)
"""
BROKEN_LOSS = """
from training.core_algos import get_policy_loss_fn, register_policy_loss

CALLS = []


@register_policy_loss("breaks")
def breaks(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
    CALLS.append(1)
    if len(CALLS) > 8:
        raise KeyError("no such loss")
    vanilla = get_policy_loss_fn("vanilla")
    return vanilla(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config)
"""


@pytest.mark.seconds
@pytest.mark.parametrize("save_freq", [100, -1])
def test_an_error_of_a_reward_function_costs_no_whole_step(tiny_task, tmp_path, save_freq) -> None:
    """The run goes on from the step before, bitwise as if there had been no error."""
    (tmp_path / "rewards.py").write_text(BROKEN_REWARDS)
    words = ("data.val_files=null", f"trainer.save_freq={save_freq}", "trainer.deterministic=true")
    words = (*words, "trainer.total_training_steps=4")
    broken = tmp_path / "broken"
    with pytest.raises(Exception, match="no such answer"):
        own = (f"custom_reward_function.path={tmp_path}/rewards.py",)
        fit(tiny_config(tiny_task, broken, *words, *own))
    whole = [step["step"] for step in read_steps(broken)]
    assert len(whole) in (1, 2, 3), "some steps were made, not all"
    saved = whole[-1:] if save_freq > 0 else []
    assert saved_steps(broken) == saved
    if saved:
        fit(tiny_config(tiny_task, broken, *words))
        fit(tiny_config(tiny_task, tmp_path / "sound", *words))
        for part in ("actor/model", "actor/optimizer", "critic/model"):
            ends = [
                tensors(folder / "global_step_4" / part) for folder in (broken, tmp_path / "sound")
            ]
            assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


@pytest.mark.seconds
def test_an_error_in_an_update_saves_no_weights_of_half_a_step(tiny_task, tmp_path) -> None:
    (tmp_path / "loss.py").write_text(BROKEN_LOSS)
    with pytest.raises(Exception, match="no such loss"):
        fit(
            tiny_config(
                tiny_task,
                tmp_path,
                *("data.val_files=null", "trainer.save_freq=100", "trainer.total_training_steps=9"),
                f"custom_algorithm={tmp_path}/loss.py",
                "actor_rollout_ref.actor.policy_loss.loss_mode=breaks",
            )
        )
    assert [step["step"] for step in read_steps(tmp_path)], "a step was made"
    assert saved_steps(tmp_path) == []


@pytest.mark.long
def test_interrupted_runs_save_and_go_on_with_the_command_that_they_print(
    tiny_task, tmp_path
) -> None:
    """Wherever Ctrl-C comes, in generation or in an update, no step is lost or made twice."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    rare = "trainer.save_freq=100"
    subprocess.run(
        [*command(tiny_task, whole, "hf", steps=20), rare], check=True, capture_output=True
    )
    argv, rng = [*command(tiny_task, broken, "hf", steps=20), rare], random.Random(5)
    for _ in range(2):
        before = steps_logged(broken)
        caught: dict[str, Any] = {
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        process = subprocess.Popen(argv, **caught, cwd=PROJECT, preexec_fn=listen_to_ctrl_c)
        while process.poll() is None and steps_logged(broken) < max(before + 1, 2):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
        assert process.returncode == 128 + signal.SIGINT, said
        goes_on = re.search(
            r"saved step (\d+) in .*; it goes on with: \S*python (main\.py .*)", said
        )
        assert goes_on is not None and (broken / f"global_step_{goes_on[1]}").is_dir(), said
        assert steps_logged(broken) in (int(goes_on[1]), int(goes_on[1]) + 1), (
            "of the validation before the first step"
        )
        argv = [sys.executable, *goes_on[2].split()]
    subprocess.run(argv, check=True, capture_output=True, cwd=PROJECT)
    assert_same_end(whole, broken, steps=20)
