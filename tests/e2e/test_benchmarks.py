"""Benchmarks that a GPU is asked for run on the CPU, tiny: nothing else tells that one broke."""

from __future__ import annotations

import re

import pytest

from tests.benchmarks import step_phases


@pytest.mark.long
def test_the_phases_of_a_step_are_measured_on_a_tiny_model() -> None:
    words = "--size tiny --device cpu --prompts 2 --tokens 8 --steps 1"
    told = step_phases.main(step_phases.parse(words.split()))
    assert re.search(r"update_actor +\d+\.\d+ s", told), told
    assert re.search(r"gen +\d+\.\d+ s", told), told
