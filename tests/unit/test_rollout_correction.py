"""Tests the correction of engine against trainer by hand, and the metrics of their mismatch."""

import math

import numpy as np
import pytest
import torch

from data.protocol import DataProto
from training.config import RolloutCorrectionConfig
from training.rollout_correction import (
    apply_correction,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
    rejection_limits,
)
from training.rollout_mismatch import compute_offpolicy_metrics, measure_mismatch, read_mismatch

# Ratios of two rows; the last token of the second is masked.
RATIOS = torch.tensor([[0.5, 4.0, 1.0], [1.5, 0.1, 9.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


# Weights


def test_tokens_weigh_their_ratio_up_to_the_threshold() -> None:
    weights, metrics = compute_rollout_correction_weights(
        RATIOS.log(), MASK, "token", rollout_is_threshold=2.0
    )
    torch.testing.assert_close(weights, torch.tensor([[0.5, 2.0, 1.0], [1.5, 0.1, 0.0]]))
    assert metrics["rollout_is_mean"] == pytest.approx(5.1 / 5)
    squares = 0.25 + 4 + 1 + 2.25 + 0.01
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx((5.1 / 5) ** 2 / (squares / 5))
    assert metrics["rollout_is_oob_ratio"] == pytest.approx(1 / 5)
    assert metrics["rollout_is_max"] == 2.0, "of the weights as they are"
    assert metrics["rollout_is_min"] == pytest.approx(0.1)
    assert metrics["rollout_is_std"] == pytest.approx((squares / 5 - (5.1 / 5) ** 2) ** 0.5)


def test_tokens_outside_a_band_weigh_nothing() -> None:
    weights, metrics = compute_rollout_correction_weights(
        RATIOS.log(), MASK, "token", rollout_is_threshold="0.5_2.0"
    )
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.0, 1.0], [1.5, 0.0, 0.0]]))
    assert metrics["rollout_is_oob_ratio"] == pytest.approx(2 / 5)


def test_a_sequence_weighs_the_product_of_its_tokens() -> None:
    weights, metrics = compute_rollout_correction_weights(RATIOS.log(), MASK, "sequence", 1.5)
    torch.testing.assert_close(weights[:, 0], torch.tensor([1.5, 0.15]))
    assert metrics["rollout_is_max"] == pytest.approx(2.0), "of the ratios, before the threshold"
    assert metrics["rollout_is_min"] == pytest.approx(0.15)
    weights, _ = compute_rollout_correction_weights(RATIOS.log(), MASK, "sequence")
    torch.testing.assert_close(weights, torch.tensor([[2.0, 2.0, 2.0], [0.15, 0.15, 0.0]]))
    normalised, metrics = compute_rollout_correction_weights(
        RATIOS.log(), MASK, "sequence", rollout_is_batch_normalize=True
    )
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx((2 + 0.15) / 2), "over rows"
    torch.testing.assert_close(normalised, weights / 1.075)


def test_settings_take_thresholds_as_numbers_too() -> None:
    """As verl's configuration holds them."""
    numbers = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_threshold=1.25, rollout_rs="token_k1", rollout_rs_threshold=3
    )
    texts = RolloutCorrectionConfig(
        rollout_is="token",
        rollout_is_threshold="1.25",
        rollout_rs="token_k1",
        rollout_rs_threshold="3",
    )
    assert numbers == texts
    new, old = RATIOS.log(), torch.zeros_like(RATIOS)
    for settings in (vars(numbers), vars(texts)):
        known = {name: value for name, value in settings.items() if name.startswith("rollout_")}
        weights, mask, _ = compute_rollout_correction_and_rejection_mask(new, old, MASK, **known)
        assert weights.batch["rollout_is_weights"].max() == 1.25
        assert mask.tolist() == [[1, 0, 1], [1, 0, 0]]
    for wrong in (True, [2.0], {"upper": 2.0}):
        with pytest.raises(ValueError, match="rollout_is_threshold"):
            RolloutCorrectionConfig(rollout_is_threshold=wrong)


@pytest.mark.parametrize(
    "threshold", ["x", "0", "-1", "nan", "2.0_0.5", "-1_2", "nan_2", None, True]
)
def test_what_is_no_threshold_is_refused(threshold: object) -> None:
    with pytest.raises(ValueError, match="must be a number above 0, or two as LOWER_UPPER"):
        compute_rollout_correction_weights(RATIOS.log(), MASK, rollout_is_threshold=threshold)


# Rejection


def test_tokens_too_far_apart_are_left_out_by_their_log_ratio() -> None:
    kept, metrics = compute_rollout_rejection_mask(
        RATIOS.log(), MASK, "token_k1", rollout_rs_threshold="0.4_5.0"
    )
    # k1 is -log r: a band of 0.4 to 5 for 1 / r.
    assert kept.tolist() == [[1, 0, 1], [1, 0, 0]]
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(2 / 5)
    k1 = [math.log(2), -math.log(4), 0.0, -math.log(1.5), math.log(10)]
    assert metrics["rollout_rs_token_k1_mean"] == pytest.approx(sum(k1) / 5)


@pytest.mark.parametrize(
    ("name", "threshold", "rows_kept"),
    [
        # Sums of -log r: -log 2 and -log 0.15; means are over 3 and 2 tokens.
        ("seq_sum_k1", "0.4_2.0", [1, 0]),
        ("seq_mean_k1", "0.4_2.0", [1, 0]),
        ("seq_mean_k1", "0.4_3.0", [1, 1]),
        # Half the squares: .24, .96, 0 and .08, 2.65.
        ("seq_sum_k2", "1.3", [1, 0]),
        ("seq_max_k2", "0.9", [0, 0]),
        ("seq_max_k2", "1.0", [1, 0]),
        # r - 1 - log r: .19, 1.61, 0 and .09, 1.40.
        ("seq_max_k3", "1.5", [0, 1]),
        ("seq_mean_k3", "0.7", [1, 0]),
    ],
)
def test_a_row_is_left_out_by_a_sum_mean_or_maximum(
    name: str, threshold: str, rows_kept: list[int]
) -> None:
    kept, metrics = compute_rollout_rejection_mask(RATIOS.log(), MASK, name, threshold)
    assert torch.equal(kept, MASK * torch.tensor(rows_kept)[:, None])
    if name == "seq_max_k2":
        # By token, as verl has it: three of the first row, two of the second.
        mean = (3 * 0.5 * math.log(4) ** 2 + 2 * 0.5 * math.log(10) ** 2) / 5
        assert metrics["rollout_rs_seq_max_k2_mean"] == pytest.approx(mean)


def test_limits_are_one_for_all_or_one_for_each() -> None:
    assert rejection_limits("token_k1, seq_max_k2", "2") == {
        "token_k1": (pytest.approx(-math.log(2)), math.log(2)),
        "seq_max_k2": (-math.inf, 2),
    }
    assert rejection_limits("token_k3,seq_max_k2", "1,2")["seq_max_k2"] == (-math.inf, 2)
    for names, threshold, message in (
        ("", "1", "rollout_rs='' is unknown"),
        ("tokn_k1", "1", r"rollout_rs='tokn_k1' is unknown.*Did you mean 'token_k1'"),
        ("token_k1", None, "must be one, or one for each"),
        ("token_k1", "1,2", "must be one, or one for each"),
        ("token_k2", "0.5_2", "token_k2 has one bound, an upper one"),
    ):
        with pytest.raises(ValueError, match=message):
            rejection_limits(names, threshold)


# Both


def test_a_row_with_a_token_below_the_veto_is_left_out() -> None:
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        RATIOS.log(), torch.zeros(2, 3), MASK, rollout_token_veto_threshold=0.2
    )
    assert weights is None and mask.tolist() == [[1, 1, 1], [0, 0, 0]]
    assert metrics["rollout_corr/rollout_rs_veto_seq_fraction"] == 0.5


def test_a_batch_without_tokens_has_weights_and_metrics_of_zero() -> None:
    empty = torch.zeros(2, 3)
    batch = DataProto.from_dict(
        tensors={"old_log_probs": empty, "rollout_log_probs": empty + 1, "response_mask": empty}
    )
    correction = RolloutCorrectionConfig(
        rollout_is="token", rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2.0"
    )
    metrics = apply_correction(batch, correction)
    assert not batch.batch["rollout_is_weights"].any() and not batch.batch["response_mask"].any()
    assert not any(metrics.values())


# Mismatch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mismatch_is_measured_the_same_of_halves(dtype):
    generator = torch.Generator().manual_seed(0)
    engine = (-torch.rand(8, 400, generator=generator)).to(dtype)
    trainer = (engine.float() + 0.1 * torch.randn(8, 400, generator=generator)).to(dtype)
    mask = torch.ones(8, 400)
    exact = compute_offpolicy_metrics(trainer.double(), engine.double(), mask)
    assert compute_offpolicy_metrics(trainer, engine, mask) == pytest.approx(
        exact, rel=1e-4, abs=1e-6
    )
    assert exact["chi2_seq"] == pytest.approx(
        ((trainer.double() - engine.double()).sum(1) * 2).exp().mean() - 1
    )


def test_of_a_batch_without_tokens_mismatch_is_zero():
    empty = torch.zeros(2, 3)
    assert not any(
        compute_offpolicy_metrics(empty, empty, empty).get(name)
        for name in ("kl", "k3_kl", "chi2_token")
    )
    shares, _ = measure_mismatch(empty, empty, empty)
    read = read_mismatch({name: share.item() for name, share in shares.items()})
    assert not any(read[f"training/rollout_ratio_p{percent}"] for percent in ("01", "50", "99"))


def test_the_rows_that_differ_most_are_measured() -> None:
    metrics = compute_offpolicy_metrics(RATIOS.log(), torch.zeros(2, 3), MASK)
    # Minus the mean log-ratio of each row: of 2 over three tokens, and of 0.15 over two.
    assert metrics["log_ppl_diff_min"] == pytest.approx(-math.log(2) / 3)
    assert metrics["log_ppl_diff_max"] == pytest.approx(-math.log(0.15) / 2)
    half = MASK * torch.tensor([[1], [0]])
    metrics = compute_offpolicy_metrics(RATIOS.log(), torch.zeros(2, 3), half)
    assert metrics["log_ppl_diff_min"] == metrics["log_ppl_diff_max"], "rows without tokens are out"


# Episodes of several rows: the first and third row are one, of ratios 2, 1 and 3.


SEVERAL_ROWS = torch.tensor([[2.0, 1.0], [0.5, 9.0], [3.0, 9.0]])
SEVERAL_MASK = torch.tensor([[1, 1], [1, 0], [1, 0]])
EPISODES = torch.tensor([0, 1, 0])


def test_a_sequence_of_several_rows_weighs_the_product_of_all_its_tokens() -> None:
    weights, metrics = compute_rollout_correction_weights(
        SEVERAL_ROWS.log(), SEVERAL_MASK, "sequence", "10", episodes=EPISODES
    )
    torch.testing.assert_close(weights, torch.tensor([[6.0, 6.0], [0.5, 0.0], [6.0, 0.0]]))
    assert metrics["rollout_is_max"] == pytest.approx(6.0)
    normalised, metrics = compute_rollout_correction_weights(
        SEVERAL_ROWS.log(), SEVERAL_MASK, "sequence", "10", True, EPISODES
    )
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(6.5 / 2), "over episodes"
    torch.testing.assert_close(normalised, weights / 3.25)


@pytest.mark.parametrize(
    ("rule", "below", "above"),
    [
        # k1 is -log r: of the first episode -log 6, in the mean -log 1.817, of the other log 2.
        # k2 is half the square of log r, k3 is r - 1 - log r.
        ("seq_sum_k1", f"{1 / 5.9}_10", f"{1 / 6.1}_10"),
        ("seq_mean_k1", f"{1 / 1.81}_10", f"{1 / 1.82}_10"),
        ("seq_sum_k2", "0.84", "0.85"),
        ("seq_max_k2", "0.60", "0.61"),
        ("seq_max_k3", "0.90", "0.91"),
    ],
)
def test_a_sequence_is_left_out_with_all_its_rows(rule: str, below: str, above: str) -> None:
    for threshold, is_kept in ((below, 0), (above, 1)):
        kept, _ = compute_rollout_rejection_mask(
            SEVERAL_ROWS.log(), SEVERAL_MASK, rule, threshold, EPISODES
        )
        assert kept.tolist() == [[is_kept, is_kept], [1, 0], [is_kept, 0]]


def test_a_veto_leaves_out_all_rows_of_an_episode() -> None:
    old = torch.zeros(3, 2)
    engine = torch.tensor([[0.0, 0.0], [0.0, 0.0], [12.0, 0.0]])
    _, mask, _ = compute_rollout_correction_and_rejection_mask(
        old, engine, SEVERAL_MASK, EPISODES, rollout_token_veto_threshold=1e-4
    )
    assert mask.tolist() == [[0, 0], [1, 0], [0, 0]]


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout_is": "sequence", "rollout_is_threshold": "10"},
        {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
        {"rollout_rs": "seq_mean_k1,seq_max_k3", "rollout_rs_threshold": "0.5_2.0,0.5"},
        {"rollout_token_veto_threshold": 0.6},
    ],
)
def test_a_cut_into_rows_changes_nothing_of_a_correction(settings: dict) -> None:
    """Four episodes of six tokens, whole and each in two rows of three."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(4, 6, generator=generator) * 0.5
    engine = torch.zeros(4, 6)
    mask = (torch.rand(4, 6, generator=generator) < 0.8).long()

    def in_rows(whole: torch.Tensor) -> torch.Tensor:
        return whole.reshape(8, 3)

    expected = compute_rollout_correction_and_rejection_mask(old, engine, mask, **settings)
    found = compute_rollout_correction_and_rejection_mask(
        in_rows(old),
        in_rows(engine),
        in_rows(mask),
        torch.arange(4).repeat_interleave(2),
        **settings,
    )
    assert torch.equal(found[1], in_rows(expected[1]))
    if expected[0] is not None:
        weights = in_rows(expected[0].batch["rollout_is_weights"])
        torch.testing.assert_close(found[0].batch["rollout_is_weights"], weights)


def test_a_batch_is_corrected_by_its_episodes() -> None:
    batch = DataProto.from_dict(
        tensors={
            "response_mask": SEVERAL_MASK,
            "old_log_probs": SEVERAL_ROWS.log(),
            "rollout_log_probs": torch.zeros(3, 2),
        },
        non_tensors={
            "uid": np.array(["g"] * 3, dtype=object),
            "episode_id": np.array(["a", "b", "a"], dtype=object),
            "episode_row": np.array([0, 0, 1]),
        },
    )
    correction = RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_threshold="10", rollout_token_veto_threshold=0.6
    )
    apply_correction(batch, correction)
    assert batch.batch["rollout_is_weights"][:, 0].tolist() == pytest.approx([6.0, 0.5, 6.0])
    assert batch.batch["response_mask"].tolist() == [[1, 1], [0, 0], [1, 0]]
