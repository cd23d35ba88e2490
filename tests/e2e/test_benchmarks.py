"""Benchmarks that a GPU is asked for run on the CPU, tiny: nothing else tells that one broke."""

from __future__ import annotations

import re

import pytest

from tests.benchmarks import step_phases, tree_step


@pytest.mark.long
def test_the_phases_of_a_step_are_measured_on_a_tiny_model() -> None:
    words = "--size tiny --device cpu --prompts 2 --tokens 8 --steps 1"
    told = step_phases.main(step_phases.parse(words.split()))
    assert re.search(r"update_actor +\d+\.\d+ s", told), told
    assert re.search(r"gen +\d+\.\d+ s", told), told


@pytest.mark.long
def test_an_update_on_trees_is_measured_on_a_tiny_model() -> None:
    words = "--hidden 64 --layers 2 --heads 4 --vocab 256 --scale 0.1 --updates 1"
    found = tree_step.main(tree_step.parse(words.split()))
    assert list(found) == ["fork", "binary", "turns"]
    for ways in found.values():
        assert ways["unique"].ratio == 1 <= ways["tree"].ratio <= 1.1 < 2 < ways["flat"].ratio
        assert ways["tree"].memory < ways["flat"].memory
