"""Which rows of a dataset a run trains on: each once an epoch, in another order in the next."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.test_agents import GRPO, fit
from tests.e2e.test_training import tiny_config


def test_an_epoch_trains_on_every_row_once_and_the_next_in_another_order(
    tiny_task: Path, tmp_path: Path
) -> None:
    half = ("data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=32")
    steps = ("trainer.total_training_steps=4", "trainer.total_epochs=2")
    _, batches = fit(tiny_config(tiny_task, tmp_path, *GRPO, *half, *steps))
    drawn = []
    for batch in batches:
        samples = batch.non_tensor_batch["sample_index"]
        told = batch.non_tensor_batch["extra_info"][samples == 0]
        drawn += [info["index"] for info in told]
    first, second = drawn[:64], drawn[64:]
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second
