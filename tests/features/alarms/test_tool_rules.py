"""A tool whose every call fails by an exception rings, and what the policy does wrong does not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from data.protocol import DataProto
from features.alarms.monitor import Alarms
from training.config import PPOConfig
from training.observers import ObservedRun, StepReport


def batch_of(kinds: Sequence[str], name: str = "execute") -> DataProto:
    """Episodes of one row and two calls each, whose kinds of error these are; "": none."""
    size = len(kinds) // 2
    mask = torch.ones(size, 2, dtype=torch.long)
    facts = np.empty(size, dtype=object)
    for row in range(size):
        facts[row] = {
            "tool_calls": [
                {"name": name, "ok": not kind, "error_kind": kind, "seconds": 0.0}
                for kind in kinds[2 * row : 2 * row + 2]
            ],
            "sampled_tokens": 2,
        }
    return DataProto.from_dict(
        tensors={
            "responses": torch.arange(2 * size).reshape(size, 2) + 3,
            "response_mask": mask,
            "attention_mask": torch.cat([mask, mask], dim=1),
            "token_level_scores": torch.eye(size, 2),
        },
        non_tensors={
            "uid": np.array([f"g{row}" for row in range(size)], dtype=object),
            "episode_id": np.array([f"e{row}" for row in range(size)], dtype=object),
            "episode_row": np.zeros(size, dtype=object),
            "episode_facts": facts,
        },
    )


def stands(steps: Sequence[DataProto]) -> list[float]:
    """Returns for how many steps the alarm stands, after each."""
    alarms = Alarms(ObservedRun(config=PPOConfig(), run_dir=Path()))
    reports = [StepReport(step=step, batch=batch) for step, batch in enumerate(steps, start=1)]
    metrics = [alarms.step_made(report) for report in reports]
    return [found.get("alarms/tool_fails", 0.0) for found in metrics]


def test_a_tool_that_never_works_rings_in_the_second_step_and_leads_to_an_episode(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # A call with wrong arguments does not come to the tool's code.
    broken = batch_of([*["exception"] * 8, "bad_arguments", "unknown_tool"])
    assert stands([broken, broken, batch_of([""] * 8)]) == [0.0, 2.0, 0.0]
    [text] = [text for text in caplog.messages if "tool_fails" in text]
    assert "all 8 calls of execute failed by an exception, since step 1" in text


@pytest.mark.parametrize(
    "kinds",
    [
        ["exception"] * 6,
        ["exception"] * 9 + [""],
        ["exception"] * 7 + ["bad_arguments"],
        ["exception"] * 9 + ["timeout"],
        ["bad_arguments"] * 20,
        ["timeout"] * 20,
        [""] * 20,
    ],
)
def test_few_calls_calls_that_work_and_the_policys_mistakes_do_not_ring(kinds: list[str]) -> None:
    assert stands([batch_of(kinds)] * 3) == [0.0, 0.0, 0.0]


def test_invented_tools_do_not_ring() -> None:
    assert stands([batch_of(["unknown_tool"] * 20, "(unknown)")] * 3) == [0.0, 0.0, 0.0]
