"""Training goes on while a fifth of the environments crash, hang and return garbage; see
tests/benchmarks/environment_faults.py.
"""

from __future__ import annotations

import statistics
from collections import Counter
from itertools import count
from pathlib import Path

import pytest

from data.seeds import seed_for
from tests.benchmarks.environment_faults import EPISODES, Ended, expected_counts, train, write_model
from tests.benchmarks.faulty_environment import HANG_S, KINDS, kind_of

FEW = 4
ISOLATIONS = ("thread", "process")
ON_FAILURE = ("zero", "mask", "refill")


def kinds_in(seed: int, steps: int) -> Counter[str]:
    return Counter(
        kind_of(seed_for(seed, step, group))
        for step in range(1, steps + 1)
        for group in range(EPISODES)
    )


SEED = next(
    seed for seed in count() if KINDS.keys() <= kinds_in(seed, FEW).keys()
)  # with every fault in few steps


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults") / "model"
    write_model(folder)
    return folder


def check(ended: Ended, steps: int) -> None:
    assert [int(metrics["step"]) for metrics in ended.steps] == list(range(1, steps + 1))
    assert ended.wrong == []
    assert ended.left == []
    assert all(metrics["actor/skipped_updates"] == 0 for metrics in ended.steps)
    median = statistics.median(
        ended.generation(SEED, hanging=True)
    )  # single steps may be slow on a busy machine
    assert median < HANG_S, "a step waits for the deadline, not for what hangs"


def test_the_seeds_give_the_faults_that_they_are_meant_to() -> None:
    kinds, steps = kinds_in(SEED, 500), 500
    for kind, part in KINDS.items():
        assert kinds[kind] / (steps * EPISODES) == pytest.approx(part, rel=0.25), kind
    total = sum((expected_counts(SEED, step) for step in range(1, steps + 1)), Counter[str]())
    assert total["env_timeout"] == kinds["hang"]
    assert total["env_crash"] == kinds["crash"] + kinds["tuple"] + kinds["nan"]
    assert total["max_turns"] == kinds["well"] + kinds["megabyte"]


@pytest.mark.parametrize(
    ("isolation", "on_failure"),
    [pytest.param("thread", "refill", marks=pytest.mark.long), ("process", "mask")],
)
def test_a_few_steps_with_every_fault_end_with_exact_counts_and_leave_nothing(
    model, tmp_path, isolation, on_failure
) -> None:
    check(train(model, tmp_path, FEW, isolation, on_failure, seed=SEED), FEW)


@pytest.mark.slow
@pytest.mark.parametrize("on_failure", ON_FAILURE)
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_fifty_steps_with_every_fault_end_with_exact_counts_and_leave_nothing(
    model, tmp_path, isolation, on_failure
) -> None:
    check(train(model, tmp_path, 50, isolation, on_failure, seed=SEED), 50)
