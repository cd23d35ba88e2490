"""scripts/errands_curve.py: what it reads of runs, and one that it makes and goes on with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import errands_curve
from scripts.errands_curve import best_rate, curve_of, folder_of, main, table
from tests.e2e.test_training import read_steps

TREE = "tree_grpo, 4 branches at the door"
SMALL = (
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "agent.val_length=2",
)


def write(out: Path, way: str, rate: float, seed: int, successes: list[float]) -> None:
    """A run of 100 tokens a step."""
    folder = folder_of(out, way, rate, seed)
    folder.mkdir(parents=True)
    lines: list[dict[str, float]] = [{"step": 0, "val-core/errands/reward/mean@1": 1.0}]
    for step, success in enumerate(successes, start=1):
        lines.append(
            {"step": step, "agent/info/won/mean": success, "training/sampled_tokens": 100.0 * step}
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_curve_is_of_equal_parts_of_the_tokens() -> None:
    records = [
        {"agent/info/won/mean": success, "training/sampled_tokens": tokens}
        for success, tokens in ((0.1, 50), (0.3, 100), (0.5, 400), (0.7, 1010))
    ]
    # The first two begin in the first tenth; the third in the second, and is three tenths long.
    expected = [0.2, 0.5, 0.5, 0.5, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7]
    assert curve_of(records, 1000) == pytest.approx(expected)


def test_each_way_has_its_best_rate_by_the_median_of_runs_that_ended(tmp_path: Path) -> None:
    for seed, (low, high) in enumerate(((0.2, 0.9), (0.3, 0.1), (0.4, 0.2))):
        write(tmp_path, "vine", 3e-4, seed, [0.0] * 9 + [low])
        write(tmp_path, "vine", 1e-3, seed, [0.0] * 9 + [high])
    # It has not ended.
    write(tmp_path, "vine", 3e-3, 0, [1.0] * 9)
    assert best_rate(tmp_path, "vine", (0, 1, 2), 1000) == 3e-4
    assert best_rate(tmp_path, "grpo", (0, 1, 2), 1000) is None
    lines = table(tmp_path, (0, 1, 2), 1000).splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("| vine | 0.0003 | 3 | 10 | 0.30 (0.20–0.40) | 0.00 |")


@pytest.mark.slow
def test_runs_end_at_their_tokens_and_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(errands_curve, "WARM_STEPS", 20)
    words = ["--out", str(tmp_path), "--turns", "2", "--seeds", "0", "--rates", "0.001"]
    words += ["--ways", "grpo", TREE]
    assert main([*words, "--tokens", "40", *SMALL]) == 0
    run = folder_of(tmp_path, TREE, 1e-3, 0)
    steps = read_steps(run)
    so_far = [step["training/sampled_tokens"] for step in steps]
    assert so_far[-1] >= 40 and all(tokens < 40 for tokens in so_far[:-1])
    assert steps[-1]["branching/trained_rows"] > 0
    assert f"| {TREE} | 0.001 | 1 |" in capsys.readouterr().out
    # More tokens: both go on.
    assert main([*words, "--tokens", "80", *SMALL]) == 0
    further = read_steps(run)
    assert further[: len(steps)] == steps and further[-1]["training/sampled_tokens"] >= 80
    assert main([*words, "--tokens", "80", *SMALL]) == 0
    assert read_steps(run) == further
