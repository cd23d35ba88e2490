"""The proofs of every family: four in each run of the tests, all by `make zoo`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.zoo import proofs
from tests.zoo.families import FAMILIES, FAST
from tests.zoo.proofs import Subject
from workers.rollout.cached_rows import may_pad_rows

# Nats, in float32.
ENGINE_TOLERANCE = 1e-4
ROW_TOLERANCE = 1e-5
# What no loss reaches: the routers' corrections are set by a load, not by a gradient.
WITHOUT_GRADIENT = ("correction_bias",)


def entries() -> list[object]:
    """Lists the families; all but a few are slow."""
    params = []
    for name in FAMILIES:
        marks = [pytest.mark.zoo]
        if name not in FAST:
            marks.append(pytest.mark.slow)
        params.append(pytest.param(name, marks=marks))
    return params


@pytest.fixture(scope="module", params=entries())
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A family's policy and engine, with one set of weights."""
    family = FAMILIES[request.param]
    folder: Path = tmp_path_factory.mktemp("zoo") / family.name
    return Subject.load(family, family.make(folder))


def test_a_row_beside_longer_ones_is_the_row_alone(subject: Subject) -> None:
    assert proofs.row_beside_others_is_row_alone(subject) <= ROW_TOLERANCE


def test_the_engine_has_the_trainers_log_probs_before_and_after_an_update(
    subject: Subject,
) -> None:
    assert proofs.engine_is_trainer(subject) <= ENGINE_TOLERANCE
    unmoved = [name for name in proofs.update(subject) if not name.endswith(WITHOUT_GRADIENT)]
    assert not unmoved
    assert proofs.engine_is_trainer(subject) > ENGINE_TOLERANCE, "the update moved nothing"
    subject.sync()
    assert proofs.engine_is_trainer(subject) <= ENGINE_TOLERANCE


# A bias before a state, which padding then reaches.
BIASES = {
    "granite4": {"mamba_proj_bias": True},
    "lfm2": {"conv_bias": True},
    "bamba": {"mamba_proj_bias": True},
}


@pytest.mark.parametrize("name", BIASES)
def test_padding_that_reaches_a_state_is_found_and_rows_of_one_length_play_together(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family = FAMILIES[name]
    biased = replace(family, settings=family.settings | BIASES[name])
    subject = Subject.load(biased, biased.make(tmp_path / name))
    assert subject.engine.pads_rows is False
    assert "padding on the left reaches the state of its layers" in caplog.text
    assert proofs.row_beside_others_is_row_alone(subject) <= ROW_TOLERANCE
    # Seen by the same proof where the trial is left out.
    subject.engine.pads_rows = True
    assert proofs.row_beside_others_is_row_alone(subject) > ROW_TOLERANCE


def test_a_cache_that_gives_other_numbers_is_refused_with_the_difference(tmp_path: Path) -> None:
    family = FAMILIES["qwen3"]
    subject = Subject.load(family, family.make(tmp_path / "qwen3"))
    module = subject.engine.module
    forward = module.forward

    def forgets_its_cache(**inputs: Any) -> Any:
        output = forward(**inputs)
        if inputs.get("use_cache"):
            output.logits = output.logits + 0.1 * output.logits.roll(1, dims=-1)
        return output

    module.forward = forgets_its_cache
    with pytest.raises(
        ValueError, match=r"cannot play model type 'qwen3'.* a row by itself is \S+ "
    ):
        may_pad_rows(module)
