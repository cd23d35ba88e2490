"""The trainer's edges: validation in parts and alone, samplers, columns of one's own.

Also resuming into other settings.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, RandomSampler, Sampler

from data.protocol import DataProto
from main import in_one_line, run
from tests.cases import fast_and_long
from tests.conftest import PROJECT
from tests.e2e.test_training import read_steps, tiny_argv, tiny_config, train
from training.building import build_trainer
from training.config.loader import ConfigError
from training.config.reference import to_yaml
from training.ray_trainer import RayPPOTrainer
from training.run.signals import EndingSignals
from training.run.validation_names import is_validation_reward

GREEDY = "val-core/guess_the_number/reward/mean@1"


def test_validation_in_parts_is_the_validation_in_one(tiny_task: Path, tmp_path: Path) -> None:
    results = []
    for name, size in (("one", "null"), ("parts", "3")):
        folder = tmp_path / name
        dump = f"trainer.validation_data_dir={folder}/val"
        trainer = build_trainer(tiny_config(tiny_task, folder, f"data.val_batch_size={size}", dump))
        trainer.init_workers()
        results.append(trainer.validate())
        rows = [json.loads(line) for line in (folder / "val/0.jsonl").read_text().splitlines()]
        assert len({row["uid"] for row in rows}) == 16
    assert results[0] == results[1]
    assert {name for name in results[0] if is_validation_reward(name)} == {GREEDY}


def test_several_validation_answers_are_grouped_by_prompt(tiny_task: Path, tmp_path: Path) -> None:
    kwargs = "actor_rollout_ref.rollout.val_kwargs"
    config = tiny_config(
        tiny_task,
        tmp_path,
        "data.val_batch_size=5",
        f"{kwargs}.n=4",
        f"{kwargs}.do_sample=true",
        f"{kwargs}.temperature=1",
    )
    trainer = build_trainer(config)
    trainer.init_workers()
    metrics = trainer.validate()
    rewards = {name for name in metrics if is_validation_reward(name)}
    assert {name.rsplit("/", 1)[1] for name in rewards if "reward/mean" in name} == {"mean@4"}


def test_validation_alone_scores_the_checkpoint_and_leaves_the_runs_files(
    tiny_task: Path, tmp_path: Path
) -> None:
    train(tiny_config(tiny_task, tmp_path, "trainer.save_freq=2"))
    before = (tmp_path / "metrics.jsonl").read_text()
    trainer = build_trainer(tiny_config(tiny_task, tmp_path, "trainer.val_only=true"))
    trainer.init_workers()
    metrics = trainer.fit()
    assert metrics[GREEDY] == read_steps(tmp_path)[2][GREEDY]
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_a_finished_run_says_that_there_is_nothing_to_train(
    tiny_task: Path, tmp_path: Path, caplog
) -> None:
    config = tiny_config(tiny_task, tmp_path, "trainer.save_freq=2")
    train(config)
    with caplog.at_level(logging.WARNING):
        train(config)
    assert "nothing to train: the run is at step 2 of 2" in caplog.text


class Scored(Dataset):
    """Rows with tensor and other columns of their own."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {
            "input_ids": [1, 5, 8, 16],
            "attention_mask": [1, 1, 1, 1],
            "weight": torch.tensor(float(i)),
            "name": f"row {i}",
        }


def custom_trainer(tiny_task: Path, folder: Path, *overrides: str, **kwargs: Any) -> RayPPOTrainer:
    config = tiny_config(
        tiny_task, folder, "data.val_files=null", "trainer.save_freq=1", *overrides
    )
    tokenizer = build_trainer(config).tokenizer
    kwargs = {"reward_fn": lambda data: torch.ones(len(data)), "train_dataset": Scored()} | kwargs
    return RayPPOTrainer(config, tokenizer, **kwargs)


def test_columns_of_any_dataset_reach_the_reward(tiny_task: Path, tmp_path: Path) -> None:
    seen: list[tuple[float, str]] = []

    def reward(data: DataProto) -> torch.Tensor:
        seen.extend(zip(data.batch["weight"].tolist(), data.non_tensor_batch["name"], strict=True))
        return data.batch["weight"]

    trainer = custom_trainer(tiny_task, tmp_path, reward_fn=reward)
    trainer.init_workers()
    trainer.fit()
    assert len(seen) == 16
    assert all(name == f"row {int(weight)}" for weight, name in seen)


class Short(Sampler):
    """Four rows, fewer than a batch."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_a_sampler_without_a_whole_batch_is_an_error_not_an_endless_loop(
    tiny_task: Path, tmp_path: Path
) -> None:
    trainer = custom_trainer(tiny_task, tmp_path, train_sampler=Short())
    trainer.init_workers()
    with pytest.raises(ValueError, match=r"gave no batch of data\.train_batch_size=8 rows"):
        trainer.fit()


def names_in_order(task: Path, folder: Path, steps: int, sampler: Sampler) -> list[str]:
    """Trains, or goes on, up to so many steps; returns the rows that were scored."""
    seen: list[str] = []

    def reward(data: DataProto) -> torch.Tensor:
        seen.extend(data.non_tensor_batch["name"])
        return torch.ones(len(data))

    trainer = custom_trainer(
        task,
        folder,
        f"trainer.total_training_steps={steps}",
        train_sampler=sampler,
        reward_fn=reward,
    )
    trainer.init_workers()
    trainer.fit()
    return seen


def test_torchs_own_random_sampler_resumes_in_its_order(tiny_task: Path, tmp_path: Path) -> None:
    def names(folder: str, steps: int) -> list[str]:
        return names_in_order(tiny_task, tmp_path / folder, steps, RandomSampler(Scored()))

    whole = names("a", 4)
    first = names("b", 3)
    assert first + names("b", 4) == whole
    assert whole[:16] != whole[16:]


@pytest.mark.parametrize("stop", fast_and_long([1, 2, 3], fast=[2]))
def test_a_sampler_is_told_each_epoch_also_after_a_resume(
    tiny_task: Path, tmp_path: Path, stop: int
) -> None:
    """As torch's DistributedSampler is, which else gives every epoch the same order.

    An epoch has two steps: the run stops within the first one, at its end and within the second.
    """

    def make_sampler() -> DistributedSampler:
        return DistributedSampler(Scored(), num_replicas=1, rank=0, seed=3)

    expected = []
    sampler = make_sampler()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        expected += [f"row {number}" for number in sampler]
    assert expected[:16] != expected[16:]
    first = names_in_order(tiny_task, tmp_path, stop, make_sampler())
    assert first + names_in_order(tiny_task, tmp_path, 4, make_sampler()) == expected


def test_a_checkpoint_without_what_this_run_needs_is_an_error(
    tiny_task: Path, tmp_path: Path
) -> None:
    grpo = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "trainer.save_freq=2")
    train(tiny_config(tiny_task, tmp_path, *grpo))
    with pytest.raises(FileNotFoundError, match="none with actor, critic as this run needs"):
        train(tiny_config(tiny_task, tmp_path, "trainer.total_training_steps=3"))


def test_resuming_with_another_batch_size_goes_on_at_the_same_row(
    tiny_task: Path, tmp_path: Path
) -> None:
    train(tiny_config(tiny_task, tmp_path, "trainer.save_freq=1", "data.train_batch_size=8"))
    trainer = build_trainer(tiny_config(tiny_task, tmp_path, "data.train_batch_size=16"))
    trainer.init_workers()
    trainer.load_checkpoint()
    assert (trainer.global_steps, trainer.position.rows_done) == (2, 16)


def test_infos_that_only_some_answers_have_do_not_stop_a_validation(
    tiny_task: Path, tmp_path: Path
) -> None:
    calls = []

    def reward(data: DataProto) -> dict[str, Any]:
        calls.append(len(data))
        infos = {"acc": [1.0] * len(data)} if len(calls) > 1 else {}
        return {"reward_tensor": torch.ones(len(data)), "reward_extra_info": infos}

    config = tiny_config(tiny_task, tmp_path, "data.val_batch_size=10")
    trainer = build_trainer(config)
    trainer.val_reward_fn = reward
    trainer.init_workers()
    assert trainer.validate()[GREEDY] == 1.0
    assert calls == [10, 6]


def test_the_example_algorithm_trains(tiny_task: Path, tmp_path: Path) -> None:
    train(
        tiny_config(
            tiny_task,
            tmp_path,
            "custom_algorithm=examples/custom_algorithm.py",
            "algorithm.adv_estimator=group_rank",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.policy_loss.loss_mode=soft_clip",
            "actor_rollout_ref.actor.policy_loss.custom_kwargs.sharpness=4",
        )
    )
    assert read_steps(tmp_path)[1]["actor/mean_ratio"] == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("returned", ["rows", "nan"])
def test_an_estimator_that_returns_nonsense_is_named(
    tiny_task: Path, tmp_path: Path, monkeypatch, returned: str
) -> None:
    from training import core_algos

    def estimator(
        token_level_rewards: torch.Tensor, response_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        good = response_mask.float()
        return (good.sum(dim=1) if returned == "rows" else good * float("nan")), good

    monkeypatch.setitem(core_algos.ADV_ESTIMATOR_REGISTRY, "nonsense", estimator)
    with pytest.raises(
        ConfigError, match=r"estimator 'nonsense'.*of shape .*before the first step"
    ):
        custom_trainer(tiny_task, tmp_path, "algorithm.adv_estimator=nonsense")


@pytest.mark.parametrize("older", [False, True])
def test_a_disk_full_at_the_last_checkpoint_costs_that_alone_and_is_said_in_a_line(
    tiny_task: Path, tmp_path: Path, capsys, older: bool
) -> None:
    """The report is written, the exit code is 1.

    Files of at most 200 KB stand for the disk: the report fits, weights do not.
    """
    argv = [str(tmp_path / "tiny.yaml"), "trainer.save_freq=5", "data.val_files=null"]
    (tmp_path / "tiny.yaml").write_text(to_yaml(tiny_config(tiny_task, tmp_path)))
    if older:
        assert run([*argv, "trainer.total_training_steps=1"], EndingSignals()) == 0
        (tmp_path / "report.png").unlink()
        capsys.readouterr()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        code = run(argv, EndingSignals())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    out, err = capsys.readouterr()
    left = f"{tmp_path} keeps the one of step 1: " if older else f"{tmp_path} holds no other: "
    assert (code, (tmp_path / "report.png").exists()) == (1, True)
    assert "reward curve: " in out
    assert err.splitlines()[-1].startswith(
        "the last checkpoint, of step 2, was not saved (files may have 200,000 bytes here, see "
        f"ulimit -f); {left}"
    )
    assert "Traceback" not in err


@pytest.mark.parametrize("option", ["--help", "--explain"])
def test_what_is_printed_into_a_closed_pipe_ends_without_a_word(
    tiny_task: Path, tmp_path: Path, option: str
) -> None:
    (tmp_path / "tiny.yaml").write_text(to_yaml(tiny_config(tiny_task, tmp_path)))
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "main.py", str(tmp_path / "tiny.yaml"), option]
    done = subprocess.run(
        command, cwd=PROJECT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_a_run_without_an_address_has_a_cluster_of_its_own_whatever_else_is_started_here() -> None:
    pytest.importorskip("ray")
    code = (
        "import sys, ray; from training.config.loader import load_config\n"
        "from training.run.ray_cluster import ray_cluster\n"
        "config = load_config(sys.argv[1:], check=False).config\n"
        "with ray_cluster(config): print(len(ray.nodes()), ray.cluster_resources()['CPU'])"
    )
    command = [sys.executable, "-c", code, "trainer.n_gpus_per_node=3"]
    environment = os.environ | {"RAY_ADDRESS": "127.0.0.1:1"}
    done = subprocess.run(
        command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["1", "3.0"], done.stderr


@pytest.mark.long
def test_what_is_wrong_with_the_data_ends_in_one_line_and_debug_shows_where(
    tiny_task: Path, tmp_path: Path
) -> None:
    row = {"prompt": "1 is 1 " * 99, "data_source": "toy", "reward_model": {"ground_truth": "2"}}
    (tmp_path / "bad.jsonl").write_text((json.dumps(row) + "\n") * 8)
    command = [
        sys.executable,
        "main.py",
        *tiny_argv(tiny_task, tmp_path),
        f"data.train_files={tmp_path}/bad.jsonl",
    ]
    plain = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert plain.returncode == 1 and "Traceback" not in plain.stderr
    assert plain.stderr.splitlines()[-1].startswith(
        f"ValueError: {tmp_path}/bad.jsonl row 0: the prompt has 302"
    )
    assert plain.stderr.rstrip().endswith("; --debug shows where")
    debug = subprocess.run([*command, "--debug"], cwd=PROJECT, capture_output=True, text=True)
    assert debug.returncode == 1 and "Traceback" in debug.stderr and "rl_dataset.py" in debug.stderr


def test_lack_of_memory_is_said_with_the_settings_that_take_it(
    tiny_task: Path, tmp_path: Path
) -> None:
    config = tiny_config(tiny_task, tmp_path)
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60)
    line = in_one_line(raised.value, config)
    assert (
        line is not None
        and "ppo_max_token_len_per_gpu (the actor's is 4096)" in line
        and "\n" not in line
    )
    assert in_one_line(KeyError("own code"), config) is None
