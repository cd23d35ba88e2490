"""Groups without variance in training, on prompts and in games.

What takes their place, and when nothing can.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import pyarrow.parquet as pq
import pytest

from data.protocol import DataProto
from data.rl_dataset import EpochOrder
from tests.conftest import PROJECT
from tests.e2e.agent_games import rare_varies
from tests.e2e.prompt_scores import varies
from tests.e2e.test_agents import (
    GRPO,
    SEED,
    Interrupted,
    assert_finite,
    assert_same_end,
    end_after,
    endings,
    fit,
    game_config,
    playing,
    seeds_of,
)
from tests.e2e.test_training import read_steps, tiny_config

FILTER = ("algorithm.filter_groups.enable=true", "trainer.total_training_steps=3")


def expect_drawn(varying: Iterator[list[bool]], wanted: int, most: int) -> tuple[int, int, int]:
    """Returns (groups found, batches, groups dropped) of one step.

    Args:
        varying: which groups of each batch vary.
    """
    found = batches = dropped = 0
    while found < wanted and batches < most:
        batch, batches = next(varying), batches + 1
        found, dropped = min(wanted, found + sum(batch)), dropped + batch.count(False)
    return found, batches, dropped


@pytest.mark.parametrize("most", [10, 2])
def test_tasks_that_teach_nothing_give_way_to_others(tiny_game, tmp_path, most) -> None:
    bound = f"algorithm.filter_groups.max_num_gen_batches={most}"
    trainer, batches = fit(
        game_config(tiny_game, tmp_path, *GRPO, *playing("Rare"), *FILTER, bound)
    )
    steps = read_steps(tmp_path)
    assert_finite(trainer, steps)
    short = 0
    for number, (step, batch) in enumerate(zip(steps, batches, strict=True), start=1):
        varying = (
            [rare_varies(seed) for seed in seeds_of(number, first=8 * k)] for k in range(most)
        )
        found, drawn, dropped = expect_drawn(varying, 8, most)
        assert (step["filter_groups/batches"], step["filter_groups/dropped"]) == (drawn, dropped)
        check_what_is_left(batch, found)
        assert endings(step) == {"done": 32 * drawn}, "what was dropped was played as well"
        short += found < 8
    assert (short > 0) == (most == 2)


def check_what_is_left(batch: DataProto, found: int) -> None:
    real = batch.drop_dummies()
    groups = Counter(real.non_tensor_batch["uid"])
    assert set(groups.values()) == {4}
    assert len(groups) == found
    scores = real.batch["token_level_scores"].sum(dim=1).view(found, 4)
    assert (scores.std(dim=1) > 0).all()
    assert real.batch["advantages"].any(dim=1).all()
    assert len(batch) == 2 * 4 * math.ceil(found / 2), (
        "two mini-batches of one size, padded with dummies"
    )


def scored_by(name: str) -> tuple[str, ...]:
    return (
        f"custom_reward_function.path={PROJECT}/tests/e2e/prompt_scores.py",
        f"custom_reward_function.name={name}",
    )


@pytest.mark.parametrize("most", [10, 2])
def test_prompts_that_teach_nothing_give_way_to_the_next_rows(tiny_task, tmp_path, most) -> None:
    bound = f"algorithm.filter_groups.max_num_gen_batches={most}"
    settings = (*GRPO, *FILTER, *scored_by("some_vary"), bound, "data.val_files=null")
    trainer, batches = fit(tiny_config(tiny_task, tmp_path, *settings))
    steps = read_steps(tmp_path)
    assert_finite(trainer, steps)
    truths = [
        row["reward_model"]["ground_truth"]
        for row in pq.read_table(tiny_task / "train.parquet").to_pylist()
    ]
    varying, drawn_in_all = batches_in_order(truths), 0
    for step, batch in zip(steps, batches, strict=True):
        found, drawn, dropped = expect_drawn(varying, 8, most)
        drawn_in_all += drawn
        assert (step["filter_groups/batches"], step["filter_groups/dropped"]) == (drawn, dropped)
        check_what_is_left(batch, found)
        assert step["training/epoch"] == (drawn_in_all - 1) // 8
    assert drawn_in_all > 3


def batches_in_order(truths: list[str]) -> Iterator[list[bool]]:
    """Which of each batch's eight prompts vary, in the run's order, epoch after epoch."""
    order = EpochOrder(truths, SEED, shuffle=True)
    for epoch in range(10):
        order.start(epoch, 0)
        rows = list(order)
        for start in range(0, len(rows), 8):
            yield [varies(truths[row]) for row in rows[start : start + 8]]


def test_rewards_that_never_differ_are_an_error_that_says_what_to_change(
    tiny_task, tiny_game, tmp_path
) -> None:
    bound = "algorithm.filter_groups.max_num_gen_batches=2"
    error = r"in 2 batches no group had two different values of 'seq_reward'"
    with pytest.raises(ValueError, match=error):
        fit(game_config(tiny_game, tmp_path / "game", *GRPO, *playing("Equal"), *FILTER, bound))
    config = tiny_config(
        tiny_task, tmp_path / "task", *GRPO, *FILTER, *scored_by("all_equal"), bound
    )
    with pytest.raises(ValueError, match=error):
        fit(config)


def test_an_interrupted_run_with_dynamic_sampling_goes_on_with_the_right_rows(
    tiny_task, tmp_path
) -> None:
    fixed = (
        *GRPO,
        "algorithm.filter_groups.enable=true",
        "trainer.total_training_steps=4",
        "trainer.save_freq=1",
    )
    fixed += (
        "trainer.deterministic=true",
        "data.val_files=null",
        "algorithm.filter_groups.max_num_gen_batches=3",
    )
    fit(tiny_config(tiny_task, tmp_path / "whole", *fixed))
    assert sum(step["filter_groups/batches"] for step in read_steps(tmp_path / "whole")) > 4, (
        "or nothing is tested"
    )
    with pytest.raises(Interrupted):
        fit(tiny_config(tiny_task, tmp_path / "broken", *fixed), end_after(2))
    fit(tiny_config(tiny_task, tmp_path / "broken", *fixed))
    assert_same_end(tmp_path / "whole", tmp_path / "broken", step=4)


def test_a_run_ends_at_its_sampled_tokens_those_of_dropped_groups_included(
    tiny_task, tmp_path, caplog
) -> None:
    fixed = (*GRPO, *FILTER, "data.val_files=null")
    fixed += ("trainer.save_freq=1", "trainer.deterministic=true")
    fixed += ("algorithm.filter_groups.max_num_gen_batches=3",)
    played: list[tuple[int, int]] = []

    def count(trainer) -> None:
        inner = trainer.play

        def play(prompts: DataProto) -> DataProto:
            batch = inner(prompts)
            tokens = int(batch.batch["response_mask"].sum())
            played.append((batch.meta_info["global_steps"], tokens))
            return batch

        trainer.play = play

    _, batches = fit(tiny_config(tiny_task, tmp_path / "whole", *fixed), count)
    steps = read_steps(tmp_path / "whole")
    so_far = [int(step["training/sampled_tokens"]) for step in steps]
    assert so_far == [sum(tokens for at, tokens in played if at <= step) for step in (1, 2, 3)]
    trained = sum(int(batch.batch["response_mask"].sum()) for batch in batches)
    assert so_far[-1] > trained, "or no group was dropped"

    ended = (*fixed, f"trainer.total_sampled_tokens={so_far[0] + 1}")
    fit(tiny_config(tiny_task, tmp_path / "ended", *ended))
    assert [step["training/sampled_tokens"] for step in read_steps(tmp_path / "ended")] == so_far[
        :2
    ]
    with pytest.raises(Interrupted):
        fit(tiny_config(tiny_task, tmp_path / "broken", *ended), end_after(1))
    fit(tiny_config(tiny_task, tmp_path / "broken", *ended))
    assert_same_end(tmp_path / "ended", tmp_path / "broken", step=2)
    assert not (tmp_path / "broken/global_step_3").exists()
    fit(tiny_config(tiny_task, tmp_path / "broken", *ended))
    assert f"the run has sampled {so_far[1]} tokens in 2 steps" in caplog.text
    further = (*fixed, f"trainer.total_sampled_tokens={so_far[1] + 1}")
    fit(tiny_config(tiny_task, tmp_path / "broken", *further))
    assert_same_end(tmp_path / "whole", tmp_path / "broken", step=3)
