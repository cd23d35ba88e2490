"""The FLOP count of the MFU benchmark, worked by hand, and a run of it on a tiny model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.benchmarks import mfu

TINY = mfu.Settings(
    device="cpu",
    dtype="float32",
    hidden=8,
    layers=2,
    heads=2,
    kv_heads=1,
    intermediate=16,
    vocab=32,
    rows=2,
    prompt=3,
    response=2,
    group=2,
    budget=64,
    warmup=1,
    updates=2,
)


@pytest.mark.parametrize("share_prompts", [0, 1])
def test_flops_of_two_rows_by_hand(share_prompts: int, capsys: pytest.CaptureFixture[str]) -> None:
    result = mfu.measure(replace(TINY, share_prompts=share_prompts))
    # A layer: q and o 8 x 8, k and v 8 x 4, gate, up and down 8 x 16. Two layers; the head is 32 x
    # 8.
    assert result.layer_parameters == 2 * (2 * 64 + 2 * 32 + 3 * 128) == 1152
    assert result.head_parameters == 256
    # Two rows of five tokens; 1 + 2 + 3 + 4 + 5 pairs each; four tokens are sampled.
    assert result.rows == mfu.Work(tokens=10, sampled=4, pairs=30)
    assert result.row_flops == 6 * (1152 * 10 + 256 * 4) + 12 * 2 * 8 * 30 == 81_024
    if share_prompts:  # the prompt's three tokens once, and 6 + 9 + 9 pairs
        assert result.computed == mfu.Work(tokens=7, sampled=4, pairs=24)
        assert result.computed_flops == 6 * (1152 * 7 + 256 * 4) + 12 * 2 * 8 * 24 == 59_136
    else:
        assert (result.computed, result.computed_flops) == (result.rows, result.row_flops)
    assert len(result.seconds) == 2
    assert result.measured_peak > 0
    text = mfu.report(result)
    assert "of the measured peak" in text
    assert "data sheet" not in text


def test_the_whole_row_is_about_half_of_palms_pairs() -> None:
    """PaLM: 12 x layers x hidden x length a token; causal halves it, up to the diagonal."""
    work = mfu.work_of([[(0, 0)]], 1536, 1024)
    assert work.pairs / (1536 * 1536) == pytest.approx(0.5, rel=1e-3)


def test_peaks_are_found_by_the_devices_name() -> None:
    assert mfu.sheet_peak("NVIDIA H100 80GB HBM3") == 989e12
    assert mfu.sheet_peak("NVIDIA H100 PCIe") == 756e12
    assert mfu.sheet_peak("NVIDIA A100-SXM4-80GB") == 312e12
    assert mfu.sheet_peak("CPU") is None


def test_options_win_over_the_size() -> None:
    settings = mfu.parse(["--size", "1.5B", "--rows", "8", "--layers", "2"])
    assert (settings.hidden, settings.layers, settings.rows, settings.prompt) == (1536, 2, 8, 512)
