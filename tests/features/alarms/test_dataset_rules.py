"""What a dataset says of a prompt stays with it, and no prompt comes twice in a step."""

from __future__ import annotations

import numpy as np
import torch

from data.protocol import DataProto
from features.alarms.finding import Finding
from features.alarms.rules.dataset import DatasetRules
from tests.features.alarms.made_steps import made_run, seen_step

MEMBERS = 2


def answered(prompts: list[int], truths: list[str]) -> DataProto:
    """Groups of two answers to each of the prompts; a truth for every row."""
    numbers = np.repeat(prompts, MEMBERS)
    return DataProto.from_dict(
        tensors={
            "prompts": torch.from_numpy(np.stack([np.zeros_like(numbers), numbers], axis=1)),
            "attention_mask": torch.tensor([[0, 1, 1]]).repeat(len(numbers), 1),
            "response_mask": torch.ones(len(numbers), 1),
        },
        non_tensors={
            "uid": np.array([f"g{row // MEMBERS}" for row in range(len(numbers))], dtype=object),
            "reward_model": np.array([{"ground_truth": each} for each in truths], dtype=object),
        },
    )


def truth_of(prompts: list[int], shift: int = 0) -> list[str]:
    return [str(prompt + shift) for prompt in np.repeat(prompts, MEMBERS).tolist()]


def truth_findings(steps: list[DataProto]) -> list[list[Finding]]:
    rules = DatasetRules(made_run())
    return [list(rules.other_truths(seen_step(step))) for step in steps]


FIRST, SECOND = [1, 2, 3, 4], [5, 6, 7, 8]


def test_members_of_a_group_with_different_truths_are_named() -> None:
    truths = np.roll(truth_of(FIRST), 1).tolist()
    ((found,),) = truth_findings([answered(FIRST, truths)])
    assert found.alarm == "truth_differs" and found.place.group == "g0"


def test_truths_of_the_next_prompt_are_named_once_prompts_have_come_again() -> None:
    right = [answered(FIRST, truth_of(FIRST)), answered(SECOND, truth_of(SECOND))]
    rolled = answered(FIRST, np.roll(truth_of(FIRST), MEMBERS).tolist())
    found = truth_findings([*right, *right, rolled])
    assert not any(found[:-1])
    assert "4 of 4 prompts that came before" in found[-1][0].text


def test_truths_that_never_stayed_are_not_watched() -> None:
    steps = [answered(FIRST, truth_of(FIRST, shift)) for shift in (0, 10, 10, 10, 20)]
    assert not any(truth_findings(steps))


def doubled_findings(steps: list[list[int]]) -> list[list[Finding]]:
    rules = DatasetRules(made_run())
    return [
        list(rules.doubled_prompts(seen_step(answered(step, truth_of(step))))) for step in steps
    ]


def test_prompts_that_have_come_to_come_twice_are_named() -> None:
    found = doubled_findings([FIRST, SECOND, [1, 2, 1, 2]])
    assert not any(found[:2])
    assert found[2][0].text == "2 of 4 prompts come twice in the step; none of 8 did before"


def test_a_dataset_whose_prompts_come_twice_is_silent() -> None:
    assert not any(doubled_findings([[1, 2, 1, 2], [3, 4, 3, 4], [5, 6, 5, 6]]))
    assert not any(doubled_findings([FIRST, [5, 6, 7, 5]]))
