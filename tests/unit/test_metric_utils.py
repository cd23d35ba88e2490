"""Tests metrics: per episode and not per row, dummies left out, numbers worked by hand."""

import itertools

import numpy as np
import pytest
import torch

from data.protocol import DataProto
from training.run import step_timer
from training.run.metrics import step_metrics, validation_metrics


def test_reduction_follows_the_words_of_the_name():
    values = [1.0, torch.tensor(2.0), 6]
    names = [
        "actor/loss",
        "actor/grad_norm_max",
        "response_length/min",
        "timing_s/gen",
        "perf/maximal",
    ]
    reduced = step_metrics.reduce_metrics(dict.fromkeys(names, values))
    assert reduced == {
        "actor/loss": 3,
        "actor/grad_norm_max": 6,
        "response_length/min": 1,
        # "timing" contains the letters of "min", not the word.
        "timing_s/gen": 3,
        "perf/maximal": 3,
    }


def test_reduction_takes_numbers_arrays_and_tensors_of_any_shape():
    reduced = step_metrics.reduce_metrics(
        {
            "a": 2,
            "b": np.array([1, 2]),
            "c": torch.tensor([[1.0, 2.0], [3.0, 6.0]]),
            "d": torch.tensor(4, requires_grad=False),
        }
    )
    assert reduced == {"a": 2, "b": 1.5, "c": 3, "d": 4}
    assert all(isinstance(value, float) for value in reduced.values())


def batch_of_three_episodes(dummy=True):
    """Makes episodes x of rows 0 and 2, y of row 1, z of row 3, which sampled nothing, and a dummy.

    P = 2, R = 3.
    """
    response_mask = torch.tensor([[1, 0, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]])
    responded = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]])
    prompted = torch.tensor([[0, 1], [1, 1], [1, 1], [0, 1], [1, 1]])
    scores = torch.tensor([[0.0, 0, 1], [0, 4, 0], [2, 0, 0], [0, 0, 0], [0, 0, 100]])
    values = torch.tensor([[1.0, 50, 2], [3, 4, 50], [5, 50, 50], [50, 50, 50], [50, 50, 50]])
    data = DataProto.from_dict(
        tensors={
            "response_mask": response_mask,
            "attention_mask": torch.cat([prompted, responded], dim=1),
            "token_level_scores": scores,
            "token_level_rewards": scores - 1,
            "advantages": values + 1,
            "returns": 2 * values,
            "values": values,
        },
        non_tensors={
            "uid": np.array(["g", "g", "g", "h", "dummy"], dtype=object),
            "episode_id": np.array(["x", "y", "x", "z", "x"], dtype=object),
        },
    )
    return data if dummy else data.select_idxs([0, 1, 2, 3])


def test_data_metrics_count_an_episode_once_and_dummies_never():
    result = step_metrics.compute_data_metrics(batch_of_three_episodes(), use_critic=True)
    values = [1.0, 2, 3, 4, 5]
    assert result == pytest.approx(
        {
            # The third episode has no sampled token.
            "critic/score/mean": (3 + 4) / 2,
            "critic/score/max": 4,
            "critic/score/min": 3,
            "critic/rewards/mean": ((3 - 6) + (4 - 3)) / 2,
            "critic/rewards/max": 1,
            "critic/rewards/min": -3,
            "critic/advantages/mean": 4,
            "critic/advantages/max": 6,
            "critic/advantages/min": 2,
            "critic/returns/mean": 6,
            "critic/returns/max": 10,
            "critic/returns/min": 2,
            "critic/values/mean": 3,
            "critic/values/max": 5,
            "critic/values/min": 1,
            "critic/vf_explained_var": 1 - np.var(values) / (4 * np.var(values) + 1e-5),
            "response_length/mean": (4 + 2 + 0) / 3,
            "response_length/max": 4,
            "response_length/min": 0,
            "response_length/clip_ratio": 1 / 3,
            "prompt_length/mean": (1 + 2 + 1) / 3,
            "prompt_length/max": 2,
            "prompt_length/min": 1,
            "prompt_length/clip_ratio": 2 / 3,
            "response/aborted_ratio": 1 / 3,
        }
    )
    assert result == step_metrics.compute_data_metrics(batch_of_three_episodes(dummy=False))


def test_data_metrics_do_not_depend_on_row_order():
    data = batch_of_three_episodes()
    assert step_metrics.compute_data_metrics(data.select_idxs([4, 2, 3, 0, 1])) == pytest.approx(
        step_metrics.compute_data_metrics(data)
    )


def test_without_episode_ids_or_a_critic_rows_are_episodes():
    data = batch_of_three_episodes()
    data.pop(batch_keys=["values"], non_tensor_batch_keys=["episode_id"])
    result = step_metrics.compute_data_metrics(data, use_critic=False)
    assert result["critic/score/mean"] == pytest.approx((1 + 4 + 2) / 3)
    assert not any("values" in name or "vf" in name for name in result)


def test_a_batch_of_dummies_alone_has_no_metrics():
    assert step_metrics.compute_data_metrics(batch_of_three_episodes().select_idxs([4])) == {}


def test_timing_is_per_token_of_the_section():
    timing = {"gen": 0.6, "update_actor": 1.4, "step": 3.0, "reward": 0.1}
    # There are 6 response tokens and 6 prompt tokens.
    result = step_metrics.compute_timing_metrics(batch_of_three_episodes(), timing)
    assert result == pytest.approx(
        {
            **{f"timing_s/{name}": seconds for name, seconds in timing.items()},
            "timing_per_token_ms/gen": 100,
            "timing_per_token_ms/update_actor": 1400 / 12,
        }
    )


def test_throughput_counts_real_tokens_per_second_and_gpu():
    assert step_metrics.compute_throughout_metrics(
        batch_of_three_episodes(), {"step": 3.0}, n_gpus=2
    ) == {
        "perf/total_num_tokens": 12,
        "perf/time_per_step": 3.0,
        "perf/throughput": 2.0,
    }


# Validation


def test_best_and_worst_of_k_equal_the_enumeration_of_all_draws():
    samples = [0.0, 1.0, 5.0]
    result = validation_metrics.process_validation_metrics(
        ["s"] * 3, ["p"] * 3, {"reward": samples}
    )["s"]["reward"]
    assert set(result) == {"mean@3", "std@3"} | {
        f"{kind}@{k}/{what}"
        for kind in ("best", "worst")
        for k in (2, 3)
        for what in ("mean", "std")
    }
    assert result["mean@3"] == 2 and result["std@3"] == pytest.approx(np.std(samples))
    for k, (kind, pick) in itertools.product((2, 3), (("best", max), ("worst", min))):
        draws = [pick(draw) for draw in itertools.product(samples, repeat=k)]
        assert result[f"{kind}@{k}/mean"] == pytest.approx(np.mean(draws))
        assert result[f"{kind}@{k}/std"] == pytest.approx(np.std(draws))


def test_validation_averages_over_prompts_within_each_source():
    sources = ["math", "code", "math", "math", "math", "code"]
    uids = ["1", "1", "1", "2", "2", "2"]
    result = validation_metrics.process_validation_metrics(
        sources, uids, {"reward": [0, 3, 1, 1, 1, 5], "text": ["a"] * 6, "acc": [True, False] * 3}
    )
    assert result["code"]["reward"] == {"mean@1": 4}
    math = result["math"]["reward"]
    assert math["mean@2"] == 0.75 and math["std@2"] == 0.25
    assert math["best@2/mean"] == pytest.approx((0.75 + 1) / 2) and math[
        "worst@2/mean"
    ] == pytest.approx(0.625)
    assert set(result["math"]) == {"reward", "acc"}


def test_majority_vote_takes_the_value_of_the_most_frequent_answer():
    data = [{"pred": "a", "val": 0.0}, {"pred": "b", "val": 1.0}, {"pred": "b", "val": 1.0}]
    assert validation_metrics.calc_maj_val(data, "pred", "val") == 1.0
    assert validation_metrics.calc_maj_val(data[:2], "pred", "val") == 0.0
    infos = {"reward": [0.0, 1.0, 1.0], "pred": ["a", "b", "b"]}
    result = validation_metrics.process_validation_metrics(["s"] * 3, ["p"] * 3, infos)["s"][
        "reward"
    ]
    # Majority of 3 draws of which each is right with 2/3: 3 (2/3)^2 (1/3) + (2/3)^3 = 20/27, from
    # 1,000 resamples.
    assert result["maj@3/mean"] == pytest.approx(20 / 27, abs=0.05)
    assert (
        result
        == validation_metrics.process_validation_metrics(["s"] * 3, ["p"] * 3, infos)["s"]["reward"]
    )


def test_a_variable_counts_in_the_sources_whose_every_sample_has_a_number():
    infos = {
        "reward": [1.0, 0.0, 2.0, 4.0],
        # Only code's rule gives it.
        "length": [None, None, 3, 5],
        # One of math's samples lacks it, and it is the first.
        "late": [None, 1.0, 2.0, 3.0],
        "note": ["a", 7, "b", 9],
        "huge": [10**400, 1, 1, 1],
        "none": [None] * 4,
    }
    result = validation_metrics.process_validation_metrics(
        ["math"] * 2 + ["code"] * 2, ["1", "2", "3", "4"], infos
    )
    assert result == {
        "math": {"reward": {"mean@1": 0.5}},
        "code": {
            "reward": {"mean@1": 3},
            "length": {"mean@1": 4},
            "late": {"mean@1": 2.5},
            "huge": {"mean@1": 1},
        },
    }


def test_a_number_lacking_in_one_group_leaves_the_variable_out_of_the_whole_source():
    # Prompts of different numbers of samples are worked on apart; the rule is about the source all
    # the same.
    result = validation_metrics.process_validation_metrics(
        ["s"] * 3, ["1", "1", "2"], {"reward": [0, 1, 2], "acc": [1, 1, None]}
    )
    assert set(result["s"]) == {"reward"}


def test_majority_votes_are_taken_in_sources_that_have_answers_of_any_type():
    infos = {"reward": [0.0, 1, 0, 1, 1, 1], "pred": [None, None, None, ["x"], ["x"], ["x"]]}
    result = validation_metrics.process_validation_metrics(
        ["a", "a", "b", "b", "b", "b"], ["1", "1", "2", "2", "2", "2"], infos
    )
    assert not any(name.startswith("maj") for name in result["a"]["reward"])
    # None votes too. With 1/4 a draw, it wins by 3 or 4 of 4 draws, 13/256, or as the earlier of
    # two and two, 27/256.
    assert result["b"]["reward"]["maj@4/mean"] == pytest.approx(1 - 40 / 256, abs=0.04)
    infos = {"reward": [1.0, 1.0], "pred": [float("nan"), float("nan")]}
    assert (
        validation_metrics.process_validation_metrics(["s"] * 2, ["1"] * 2, infos)["s"]["reward"][
            "maj@2/mean"
        ]
        == 1
    )


@pytest.mark.parametrize("entries", [[], [1.0], [1.0] * 3])
def test_a_variable_without_one_entry_per_sample_is_named(entries):
    with pytest.raises(
        ValueError, match=rf"not 2, that of the samples: {{'acc': {len(entries)}}}\. Put None"
    ):
        validation_metrics.process_validation_metrics(
            ["s"] * 2, ["1"] * 2, {"reward": [0, 1], "acc": entries}
        )


def test_bootstrap_estimates_the_mean_of_subsets_and_repeats_with_its_seed():
    (mean, std), (largest, _) = validation_metrics.bootstrap_metric(
        [0.0, 1.0], 4, [np.mean, max], n_bootstrap=2000, seed=1
    )
    assert mean == pytest.approx(0.5, abs=0.03) and std == pytest.approx(0.25, abs=0.02)
    assert largest == pytest.approx(15 / 16, abs=0.03)
    assert validation_metrics.bootstrap_metric(
        [0, 1], 4, [max], seed=1
    ) == validation_metrics.bootstrap_metric([0, 1], 4, [max], seed=1)


def test_validation_metrics_are_flattened_by_source_and_variable():
    nested = {"gsm8k": {"reward": {"mean@1": 0.5}, "length": {"mean@1": 3.0}}}
    flat = {"val-core/gsm8k/reward/mean@1": 0.5, "val-aux/gsm8k/length/mean@1": 3.0}
    assert validation_metrics.flatten_validation_metrics(nested) == flat


def test_step_timer_adds_up_sections_that_come_twice(monkeypatch):
    clock = iter([0.0, 1.0, 10.0, 12.0])
    monkeypatch.setattr("training.run.step_timer.time.perf_counter", lambda: next(clock))
    timer = step_timer.StepTimer()
    for _ in range(2):
        with timer("gen"):
            pass
    assert timer.seconds == {"gen": 3.0}
