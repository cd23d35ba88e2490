"""On two ranks an update of cut episodes has the gradient of their uncut trees, as on one.

The ranks are processes with gloo, their models sharded by FSDP2. Rows of an episode may lie on
both.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cut_and_uncut import CLOSE, by_hand, distance
from tests.cut_updates import LAYOUTS, SPLITS, config_of
from tests.processes.test_ranks import join_ranks, spawn_ranks
from training.core_algos import LOSS_AGG_MODES

pytestmark = pytest.mark.seconds
ESTIMATORS = ("gae", "grpo", "turn_gae", "gigpo", "tir_optimal_token_baseline")


def run_rank(folder: str, number: int, world: int, port: int, kind: str) -> None:
    """Makes the updates of this rank; the first one writes how far they are from those by hand."""
    join_ranks(number, world, port, kind)
    hand = by_hand()
    found = {}
    divided = 0
    for case, mode in enumerate(LOSS_AGG_MODES):
        estimator = ESTIMATORS[case % len(ESTIMATORS)]
        settings = {"loss_agg_mode": mode}
        split = sorted(SPLITS)[case % len(SPLITS)]
        config = config_of(estimator, actor=settings, critic=settings, split=split, ranks=world)
        layout = sorted(LAYOUTS)[case % len(LAYOUTS)]
        got = hand.cut(hand.random_cut(case), config, seed=case, layout=layout)
        divided += got.divided
        actor = distance(got.actor[0], hand.actor(estimator, mode))
        critic = distance(got.critic[0], hand.critic("gae", mode)) if estimator == "gae" else 0.0
        found[mode] = [actor, critic]
    if number == 0:
        results = {"found": found, "divided": divided}
        Path(folder, "found.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_ranks_have_the_gradient_of_the_uncut_trees(tmp_path: Path) -> None:
    spawn_ranks(run_rank, str(tmp_path), 2, "cpu")
    results = json.loads((tmp_path / "found.json").read_text())
    assert results["divided"] >= 2, "episodes lie on both ranks"
    assert list(results["found"]) == list(LOSS_AGG_MODES)
    for distances in results["found"].values():
        assert max(distances) <= CLOSE
