"""The trainer over Ray: the same numbers as in one process, engines on every layout of ranks.

Checkpoints go on with any number of ranks.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.test_training import read_steps, tiny_config
from training.building import build_trainer
from training.config import PPOConfig

ray = pytest.importorskip("ray")
ROLLOUT = "actor_rollout_ref.rollout"
FIXED = (
    "trainer.deterministic=true",
    "data.val_files=null",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.entropy_coeff=0.01",
    "trainer.total_training_steps=3",
    "actor_rollout_ref.actor.optim.scheduler=constant",
    "critic.optim.scheduler=constant",
)
# Sums of the advantages of all tokens, which cancel: each order of adding rounds otherwise.
SUMS = ("actor/loss_targets", "actor/given_targets")
NOISE_OF_SUM = 1e-4
# Each rank counts its own rows: what rows of two ranks share counts twice.
OF_EACH_RANK = ("/computed_tokens", "/unique_tokens", "/computed_per_unique_token")
NOISE = 2e-6  # metrics that are rounding errors themselves are compared absolutely


def fit(config: PPOConfig) -> None:
    trainer = build_trainer(config)
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.shutdown()


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in s.items() if not k.startswith(("timing", "perf"))}
        for s in read_steps(run_dir)
    ]


def assert_same(one: Path, other: Path) -> None:
    for a, b in zip(numbers(one), numbers(other), strict=True):
        assert_same_step(a, b)


def assert_same_step(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compares the metrics of one step of two runs, which add their numbers in other orders."""
    for name in SUMS:
        assert other.pop(name, 0.0) == pytest.approx(one.pop(name, 0.0), abs=NOISE_OF_SUM)
    for name in [name for name in one if name.endswith(OF_EACH_RANK)]:
        del one[name], other[name]
    assert other == pytest.approx(one, rel=1e-5, abs=NOISE)


@pytest.fixture(scope="module")
def local_run(tiny_task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    fit(tiny_config(tiny_task, folder, *FIXED))
    return folder


MICRO = (
    *(
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "critic.ppo_micro_batch_size_per_gpu=1",
    ),
    *(
        f"{s}.fsdp_config.param_offload=true"
        for s in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
    ),
    *(f"{s}.fsdp_config.optimizer_offload=true" for s in ("actor_rollout_ref.actor", "critic")),
)
SHARED = (
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
    "critic.use_prefix_grouper=false",
)
PLAIN = (
    "trainer.balance_batch=false",
    "actor_rollout_ref.actor.fsdp_config.reshard_after_forward=false",
)


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(1, (), marks=pytest.mark.long),
        pytest.param(2, MICRO, marks=pytest.mark.long),
        pytest.param(2, SHARED, marks=pytest.mark.slow),
        pytest.param(2, (), marks=pytest.mark.slow),
        pytest.param(2, PLAIN, marks=pytest.mark.slow),
    ],
)
def test_ranks_over_ray_give_the_numbers_of_one_process(
    cluster: None,
    local_run: Path,
    tiny_task: Path,
    tmp_path: Path,
    ranks: int,
    overrides: tuple[str, ...],
) -> None:
    config = tiny_config(
        tiny_task,
        tmp_path,
        *FIXED,
        *overrides,
        "trainer.launcher=ray",
        f"trainer.n_gpus_per_node={ranks}",
    )
    fit(config)
    assert_same(local_run, tmp_path)


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize("tensor_parallel", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_vllm_agrees_with_the_policy_on_every_layout_of_two_ranks(
    cluster: None, tiny_task: Path, tmp_path: Path, tensor_parallel: int
) -> None:
    pytest.importorskip("vllm")
    fit(
        tiny_config(
            tiny_task,
            tmp_path,
            f"{ROLLOUT}.name=vllm",
            f"{ROLLOUT}.tensor_model_parallel_size={tensor_parallel}",
            f"{ROLLOUT}.n=2",
            "trainer.n_gpus_per_node=2",
        )
    )
    for step in read_steps(tmp_path)[1:]:
        assert step["training/rollout_probs_diff_max"] < 1e-4
        assert step["response_length/mean"] > 1
        # The canaries of both ranks: the worst counts.
        assert (
            step["canary/difference"] < 1e-4
            and step["canary/lag"] < 1e-4 < step["canary/engine_moved"]
        )


@pytest.mark.long
@pytest.mark.parametrize("ranks", [(2, 1), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_a_run_goes_on_with_another_number_of_ranks(
    cluster: None, local_run: Path, tiny_task: Path, tmp_path: Path, ranks: tuple[int, int]
) -> None:
    save = ("trainer.save_freq=1", "trainer.launcher=ray")
    for steps, number in zip((1, 3), ranks, strict=True):
        fit(
            tiny_config(
                tiny_task,
                tmp_path,
                *FIXED,
                *save,
                f"trainer.total_training_steps={steps}",
                f"trainer.n_gpus_per_node={number}",
            )
        )
    assert_same(local_run, tmp_path)


@pytest.mark.slow
def test_samples_of_two_ranks_differ_where_they_are_not_seeded(
    cluster: None, tiny_task: Path, tmp_path: Path
) -> None:
    """Two ranks given the same prompt must not draw the same answers."""
    dump = f"trainer.rollout_data_dir={tmp_path}/texts"
    config = tiny_config(
        tiny_task,
        tmp_path,
        dump,
        f"{ROLLOUT}.n=16",
        "data.val_files=null",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=1",
    )
    fit(config)
    rows = [json.loads(line) for line in (tmp_path / "texts/1.jsonl").read_text().splitlines()]
    first = [row["output"] for row in sorted(rows, key=lambda row: row["uid"])]
    assert first[:64] != first[64:]
    assert len(rows) == 128


def test_a_rank_that_fails_or_dies_is_raised_with_its_own_error(
    cluster: None, tiny_task: Path, tmp_path: Path
) -> None:
    config = tiny_config(tiny_task, tmp_path, "trainer.n_gpus_per_node=2", "data.val_files=null")
    trainer = build_trainer(config)
    trainer.init_workers()
    try:
        prompts = trainer.prompt_batch(next(iter(trainer.train_dataloader)), 1)
        with pytest.raises(ray.exceptions.RayTaskError, match="compute_values needs") as failed:
            trainer.critic_wg.compute_values(prompts)
        assert failed.value.__notes__[0].startswith("rank 0 of 2, role critic, in compute_values, ")
        assert re.search(r"ip=[\d.]+", str(failed.value)), "Ray names the host"
        with pytest.raises(
            AttributeError, match="CriticWorker has no registered method 'generate_sequences'"
        ):
            trainer.critic_wg.generate_sequences(None)
        batch = trainer._generate_multi_turn_sequences(prompts)
        end_one_rank()
        with pytest.raises(ray.exceptions.ActorDiedError) as died:
            trainer.actor_rollout_wg.update_actor(batch)
        said = died.value.__notes__[0]
        assert re.match(
            r"rank [01] of [12], role actor_rollout, in (update_actor|ranks_per_sequence)", said
        )
        assert re.search(r"\bip: [\d.]+", str(died.value)), "Ray names the host"
    finally:
        trainer.shutdown()


def end_one_rank() -> None:
    """Kills one of the ranks' processes, which Ray titles by their class."""
    for process in psutil.Process().children(recursive=True):
        # One may have ended meanwhile.
        with suppress(psutil.Error):
            if "ray::WorkerHost" in " ".join(process.cmdline()):
                process.kill()
                return
    raise AssertionError("no rank runs")


@pytest.mark.long
def test_ranks_know_an_algorithm_of_ones_own(
    cluster: None, tiny_task: Path, tmp_path: Path
) -> None:
    own = (
        "custom_algorithm=examples/custom_algorithm.py",
        "algorithm.adv_estimator=group_rank",
        "actor_rollout_ref.actor.policy_loss.loss_mode=soft_clip",
    )
    fit(tiny_config(tiny_task, tmp_path, *own, f"{ROLLOUT}.n=2", "trainer.launcher=ray"))
    assert all(step["actor/grad_norm"] > 0 for step in read_steps(tmp_path)[1:])
