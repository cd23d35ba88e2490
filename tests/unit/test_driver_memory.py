"""The driver's maths on a batch that is cut into blocks of rows.

The numbers, and the memory that it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from data.outcome_rewards import move_to_sampled_tokens, place_outcome_rewards
from data.protocol import DataProto
from training import core_algos
from training.core_algos.masked_ops import masked_mean
from training.rollout_correction import compute_offpolicy_metrics
from training.run.metrics.step_metrics import compute_data_metrics, compute_timing_metrics
from workers.ranks.memory import keep_heap

ROWS, PROMPT, RESPONSE = 512, 1024, 8192
MIB = 1 << 20


@pytest.fixture(scope="module")
def batch() -> DataProto:
    keep_heap()
    draw = torch.Generator().manual_seed(0)
    held = torch.arange(RESPONSE) < torch.randint(
        RESPONSE // 2, RESPONSE, (ROWS, 1), generator=draw
    )
    sampled = held & (torch.arange(RESPONSE) % 10 != 9)
    scores = place_outcome_rewards(torch.rand(ROWS, generator=draw), sampled)
    advantages, values = (torch.randn(ROWS, RESPONSE, generator=draw) * sampled for _ in range(2))
    tensors = {
        "response_mask": sampled.to(torch.int8),
        "attention_mask": torch.cat([torch.ones(ROWS, PROMPT), held], dim=1).to(torch.int8),
        "token_level_scores": scores,
        "token_level_rewards": scores,
        "advantages": advantages,
        "returns": advantages + values,
        "values": values,
    }
    index = np.array([f"1.{row // 8}" for row in range(ROWS)], dtype=object)
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": index})


def peak_mib(call: Callable[[], object]) -> float:
    """Measures what the process takes at most beyond what it has, in MiB."""
    status, peak = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    call()
    peak.write_text("5")

    def of(field: str) -> int:
        return next(
            int(line.split()[1])
            for line in status.read_text().splitlines()
            if line.startswith(field)
        )

    start = of("VmHWM")
    call()
    return (of("VmHWM") - start) / 1024


@pytest.mark.parametrize(
    ("call", "most"),
    [
        # A float32 matrix is 16 MiB, a mask 4; of what is returned each has one, or a mask, or a
        # number.
        (
            lambda t, uid: core_algos.compute_grpo_outcome_advantage(
                t["token_level_rewards"], t["response_mask"], uid
            ),
            36,
        ),
        (lambda t, uid: place_outcome_rewards(t["values"][:, 0], t["response_mask"]), 64),
        (lambda t, uid: move_to_sampled_tokens(t["token_level_scores"], t["response_mask"]), 16),
        (lambda t, uid: masked_mean(t["values"], t["response_mask"]), 12),
        (
            lambda t, uid: compute_offpolicy_metrics(t["values"], t["returns"], t["response_mask"]),
            46,
        ),
        (
            lambda t, uid: compute_data_metrics(
                DataProto.from_dict(tensors=t, non_tensors={"uid": uid})
            ),
            26,
        ),
        (
            lambda t, uid: compute_timing_metrics(
                DataProto.from_dict(tensors=t, non_tensors={"uid": uid}), {"gen": 1.0}
            ),
            8,
        ),
    ],
)
def test_the_drivers_maths_makes_no_float64_copy_of_a_batch(batch, call, most) -> None:
    tensors, uid = dict(batch.batch.items()), batch.non_tensor_batch["uid"]
    assert peak_mib(lambda: call(tensors, uid)) < most


@pytest.mark.seconds
def test_what_is_computed_block_by_block_is_what_is_computed_at_once(batch) -> None:
    tensors, uid = batch.batch, batch.non_tensor_batch["uid"]
    mask = tensors["response_mask"].bool()
    metrics = compute_data_metrics(batch)
    chosen = {name: tensors[name][mask].double() for name in ("advantages", "returns", "values")}
    for name, values in chosen.items():
        assert metrics[f"critic/{name}/mean"] == pytest.approx(
            values.mean().item(), rel=1e-12, abs=1e-12
        )
        assert (
            metrics[f"critic/{name}/max"] == values.max()
            and metrics[f"critic/{name}/min"] == values.min()
        )
    error = (chosen["returns"] - chosen["values"]).var(correction=0) / (
        chosen["returns"].var(correction=0) + 1e-5
    )
    assert metrics["critic/vf_explained_var"] == pytest.approx(1 - error.item(), rel=1e-12)
    lengths = tensors["attention_mask"][:, PROMPT:].sum(dim=1)
    assert metrics["response_length/mean"] == lengths.double().mean()
    assert masked_mean(tensors["values"], mask) == chosen["values"].mean().float()
    moved = move_to_sampled_tokens(tensors["values"] + 1, mask)
    few = [
        move_to_sampled_tokens(tensors["values"][rows] + 1, mask[rows])
        for rows in torch.arange(ROWS).split(3)
    ]
    assert torch.equal(moved, torch.cat(few))
    advantages, _ = core_algos.compute_grpo_outcome_advantage(
        tensors["token_level_rewards"], mask, uid
    )
    few = [
        core_algos.compute_grpo_outcome_advantage(
            tensors["token_level_rewards"][rows], mask[rows], uid[rows]
        )[0]
        for rows in torch.arange(ROWS).split(8)
    ]
    assert torch.equal(advantages, torch.cat(few))


def test_rewards_that_lie_on_sampled_tokens_are_returned_as_they_are(batch) -> None:
    scores = batch.batch["token_level_scores"]
    assert move_to_sampled_tokens(scores, batch.batch["response_mask"]) is scores
