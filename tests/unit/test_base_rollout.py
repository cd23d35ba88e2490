"""Each setting of sampling reaches the engine, those of validation in validation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from training.config import RolloutConfig
from workers.rollout.base_rollout import BaseRollout

OWN = {"temperature": 0.7, "top_k": 11, "top_p": 0.9}
VALIDATION = {"temperature": 0.3, "top_k": 5, "top_p": 0.6, "do_sample": True}


def sampling(validate: bool = False, **settings: Any) -> Any:
    val_kwargs = {**VALIDATION, **settings.pop("val_kwargs", {})}
    plain = RolloutConfig()
    config = RolloutConfig(
        **OWN,
        response_length=17,
        max_model_len=40,
        val_kwargs=type(plain.val_kwargs)(**val_kwargs),
        **settings,
    )
    rollout: Any = SimpleNamespace(config=config, response_length=17, eos_token_ids=(2, 3))
    return BaseRollout.sampling(rollout, {"validate": validate})


@pytest.mark.parametrize("name", OWN)
def test_temperature_top_k_and_top_p_are_those_of_the_section(name: str) -> None:
    assert getattr(sampling(), name) == OWN[name]
    assert getattr(sampling(validate=True), name) == VALIDATION[name]


def test_validation_is_greedy_where_it_does_not_sample() -> None:
    assert sampling(validate=True, val_kwargs={"do_sample": False}).temperature == 0
    assert sampling(val_kwargs={"do_sample": False}).temperature == 0.7


def test_ignore_eos_and_the_response_length_end_an_answer() -> None:
    assert sampling().stop_token_ids == (2, 3) and sampling().max_tokens == 17
    assert sampling(ignore_eos=True).stop_token_ids == ()
