"""Nothing that a step made outlives it: as many tensors live behind a late step as behind an early.

Tensors are counted in the trainer's process, which is that of the only rank but for runs over Ray;
there the ranks' own are counted, too. A graph that its own hook holds shows, as the hook keeps
tensors of the graph.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.e2e.test_agents import GRPO, game_config, playing
from tests.e2e.test_agents import forgetful_game as forgetful_game
from tests.e2e.test_async import SPLIT
from tests.e2e.test_training import tiny_config
from training.building import build_trainer
from training.config import PPOConfig
from workers.ranks.ray_group import RayWorkerGroup

# Tensors that may be more or fewer behind a step: a batch has as many rows, and fields, as chance
# gives its episodes. A leak of one a step shows over the 40 steps of a long run, over the 8 of a
# short one a leak of a few; a graph has dozens.
SLACK = 30
SMALL = ("data.train_batch_size=4", "trainer.save_freq=-1", "trainer.total_epochs=100")


class Run(NamedTuple):
    """The steps of a run, and those behind which tensors are counted."""

    steps: int
    early: int


SHORT = Run(steps=12, early=4)
LONG = Run(steps=60, early=20)


def live_tensors() -> int:
    """Counts the tensors of this process that can be reached from somewhere."""
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def tensors_of_ranks(trainer: Any) -> list[int]:
    """Counts those of the ranks that have processes of their own."""
    group = trainer.actor_rollout_wg
    if not isinstance(group, RayWorkerGroup):
        return []
    import ray

    # Sent as it is, as ranks cannot import this module.
    def count(host: object) -> int:
        import gc

        import torch

        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    hosts = [*group.hosts, *getattr(trainer.rollout_wg, "hosts", [])]
    return list(ray.get([host.__ray_call__.remote(count) for host in hosts]))


def tensors_behind_steps(config: PPOConfig, run: Run) -> dict[int, list[int]]:
    """Trains; returns the tensors of each process behind an early step and behind the last."""
    trainer = build_trainer(config)
    counts: dict[int, list[int]] = {}

    def count(metrics: dict[str, float]) -> None:
        if trainer.global_steps in (run.early, run.steps):
            counts[trainer.global_steps] = [live_tensors(), *tensors_of_ranks(trainer)]

    trainer.on_step = count
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.shutdown()
    return counts


def assert_nothing_stays(config: PPOConfig, run: Run) -> None:
    counts = tensors_behind_steps(config, run)
    early, late = counts[run.early], counts[run.steps]
    more = [behind - before for before, behind in zip(early, late, strict=True)]
    assert max(more) <= SLACK, f"tensors behind steps {run.early} and {run.steps}: {early}, {late}"


def of_length(run: Run) -> tuple[str, ...]:
    return (f"trainer.total_training_steps={run.steps}", "actor_rollout_ref.actor.optim.lr=1e-5")


SEVERAL_ROWS = (*GRPO, *playing("Steady"), "data.max_prompt_length=40")
KINDS: dict[str, tuple[str, ...]] = {
    "grpo": (*GRPO, *playing("Steady")),
    "gae": playing("Steady"),
    "kl": (
        *GRPO,
        *playing("Steady"),
        "actor_rollout_ref.actor.use_kl_loss=true",
        "algorithm.use_kl_in_reward=true",
    ),
    "lora": (*GRPO, *playing("Steady"), "actor_rollout_ref.model.lora_rank=4"),
    "gradients are recorded": (*GRPO, *playing("Steady"), "records.gradients=true"),
    "finished groups": (*GRPO, *playing("Steady"), "trainer.train_finished_groups=true"),
    "shared backbone": (*playing("Steady"), "critic.share_backbone=true"),
}


def test_what_a_step_made_does_not_outlive_it(tiny_game: Path, tmp_path: Path) -> None:
    settings = (*SMALL, *KINDS["gradients are recorded"], *of_length(SHORT))
    assert_nothing_stays(game_config(tiny_game, tmp_path, *settings), SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_sixty_steps_made_does_not_outlive_them(
    tiny_game: Path, tmp_path: Path, kind: str
) -> None:
    settings = (*SMALL, *KINDS[kind], *of_length(LONG))
    assert_nothing_stays(game_config(tiny_game, tmp_path, *settings), LONG)


@pytest.mark.slow
def test_sixty_steps_of_episodes_of_several_rows_leave_nothing(
    forgetful_game: Path, tmp_path: Path
) -> None:
    settings = (*SMALL, *SEVERAL_ROWS, *of_length(LONG))
    assert_nothing_stays(game_config(forgetful_game, tmp_path, *settings), LONG)


@pytest.mark.slow
def test_sixty_steps_of_prompts_leave_nothing(tiny_task: Path, tmp_path: Path) -> None:
    settings = (*SMALL, *GRPO, *of_length(LONG))
    assert_nothing_stays(tiny_config(tiny_task, tmp_path, *settings), LONG)


@pytest.mark.slow
def test_sixty_steps_that_are_sampled_ahead_leave_nothing(
    cluster: None, tiny_game: Path, tmp_path: Path
) -> None:
    ahead = (*SPLIT, "trainer.async_level=1")
    settings = (*SMALL, *GRPO, *ahead, *playing("Steady"), *of_length(LONG))
    assert_nothing_stays(game_config(tiny_game, tmp_path, *settings), LONG)


@pytest.mark.slow
@pytest.mark.vllm
def test_sixty_steps_with_vllm_leave_nothing(tiny_game: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    settings = (*SMALL, *GRPO, "actor_rollout_ref.rollout.name=vllm", *of_length(LONG))
    assert_nothing_stays(game_config(tiny_game, tmp_path, *settings), LONG)


@pytest.mark.slow
def test_a_hook_that_holds_its_own_graph_is_found(tiny_game: Path, tmp_path: Path) -> None:
    """So that the silence of the others says something."""

    def keep(trainer: Any) -> Callable[..., Any]:
        own = trainer.actor_rollout_wg.worker.actor.micro_loss

        def kept(*args: Any) -> Any:
            result = own(*args)
            output = result.outputs["log_prob"]
            output.register_hook(lambda gradient: gradient + 0 * output.detach().sum())
            return result

        return kept

    short = Run(steps=6, early=2)
    config = game_config(tiny_game, tmp_path, *SMALL, *KINDS["grpo"], *of_length(short))
    trainer = build_trainer(config)
    counts: dict[int, int] = {}
    trainer.on_step = lambda metrics: counts.update({trainer.global_steps: live_tensors()})
    try:
        trainer.init_workers()
        trainer.actor_rollout_wg.worker.actor.micro_loss = keep(trainer)
        trainer.fit()
    finally:
        trainer.shutdown()
    assert counts[short.steps] - counts[short.early] >= short.steps - short.early
